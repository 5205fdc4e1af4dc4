"""Packed sequences against padded ones and against transformers' own attention: log-probs and gradients on the device.

(5) of README.md. In float32 a layout is attended segment by segment (torch's scaled dot product), on GPUs in bfloat16
by one call of flash attention over all segments. Ulysses of degree 1 needs DeepSpeed and a process group of one.
"""

import numpy as np
import pytest

pytest.importorskip("omegaconf")
import torch
from processes import in_ranks
from small import make_rows, policy_folder, settings
from transformers import Qwen2ForCausalLM

from rlfuse.engines.trainer.micro_batch_losses import log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import load_policy

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return policy_folder(tmp_path_factory.mktemp("policy"))


def _loaded(device, folder, dtype):
    config = settings(folder, dtype)
    return config, load_policy(folder, config.model).to(device)


def _ours(config, model, rows, device, **collated):
    """Return the log-probs of each row, and the gradient of the sum of their squares."""
    batch = collate(rows, device=device, **collated)
    model.zero_grad()
    found = log_probs(config, model, batch)
    found.square().sum().backward()
    gradient = {name: parameter.grad.float().cpu() for name, parameter in model.named_parameters()}
    return np.concatenate(batch.split(found)), gradient


@torch.no_grad()
def _transformers(folder, rows, device, dtype, attention):
    """Return the same, with each row computed separately by transformers."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention)
    model, found = model.to(device), []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long().to(device)
        scores = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1].float().log_softmax(-1)
        found.append(scores.gather(1, ids[len(row.prompt_ids) :, None])[:, 0].cpu().numpy())
    return np.concatenate(found)


def _difference(ours, theirs):
    return max(float((ours[name] - each).norm() / each.norm()) for name, each in theirs.items())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_padded_and_shared_prompts_agree(device, folder, dtype):
    config, model = _loaded(device, folder, dtype)
    rows, limit = make_rows(6, longest=200 if device == "cuda" else 48), TOLERANCE[dtype]
    expected = _transformers(folder, rows, device, dtype, "sdpa")
    packed, gradient = _ours(config, model, rows, device, packed=True)
    for way in ({"packed": False}, {"packed": True, "shared": True}):
        found, other = _ours(config, model, rows, device, **way)
        scores, gradients = np.abs(found - packed).max(), _difference(other, gradient)
        print(f"{dtype}, {way}: log-probs differ by {scores:.1e}, gradients by {gradients:.1e}")
        assert scores < limit and gradients < limit
    print(f"{dtype}: from transformers' by {np.abs(packed - expected).max():.1e}")
    assert np.abs(packed - expected).max() < limit


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_flash_attention_of_the_flash_attn_package_agrees(device, folder, dtype):
    if device != "cuda" or dtype == "float32":
        pytest.skip("flash attention is for 16-bit numbers on CUDA devices")
    pytest.importorskip("flash_attn")
    rows = make_rows(6, longest=200)
    ours, theirs = (_transformers(folder, rows, device, dtype, each) for each in ("sdpa", "flash_attention_2"))
    assert np.abs(ours - theirs).max() < TOLERANCE[dtype]


def _ulysses(device, folder):
    import deepspeed

    from rlfuse.engines.trainer.sequence_parallel import SequenceSlice

    deepspeed.init_distributed(torch.distributed.get_backend(), verbose=False)  # uses the existing process group
    config, model = _loaded(device, folder, "float32")
    rows = make_rows(4)
    part = SequenceSlice(1, 0, torch.distributed.group.WORLD)
    whole, cut = (_ours(config, model, rows, device, packed=True, part=each) for each in (None, part))
    return float(np.abs(whole[0] - cut[0]).max()), _difference(cut[1], whole[1])


def test_sequence_parallelism_of_degree_1_changes_nothing(device, folder):
    pytest.importorskip("deepspeed")
    [(scores, gradients)] = in_ranks(1, _ulysses, device, folder)
    assert scores < 1e-5 and gradients < 1e-5
