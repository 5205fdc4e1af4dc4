"""Fused Triton kernels for log-probs and entropy, interpreted and compiled, and device synchronization of a pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_plan import job
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.tracing import SequenceLengths
from rlfuse.engines.trainer import fused_log_probs, micro_batch_losses, rank_group, transfers, vocabulary_kernels
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.events import Span
from rlfuse.samples import Row

GPU = Path(__file__).parent.parent / "gpu"
COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rlfuse.engines.trainer import vocabulary_kernels as kernels

pointers = dict(targets="*i64", results="*fp32", of_log_probs="*fp32", of_entropy="*fp32")
numbers = dict(logits="*bf16", rows="i32", size="i32", temperature="fp32")
found = []
for kernel, constants in ((kernels._forward, {}), (kernels._backward, {"LEARNS_ENTROPY": True})):
    constants |= {"SCALE": True, "BLOCK": 4096}
    names = kernel.arg_names
    types = {name: (pointers | numbers).get(name, "constexpr") for name in names}
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()})
    found.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])
print(json.dumps(found))
"""


def _python(*arguments, **variables):
    """Run Python in a separate process, since TRITON_INTERPRET is read when Triton is imported."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    options = "-q", "-n0", "-p", "no:cacheprovider"
    file = str(GPU / "test_9_log_probs.py")
    shown = _python("-m", "pytest", file, *options, TRITON_INTERPRET="1", RLFUSE_TEST_DEVICE="cpu")
    assert " passed" in shown and "skipped" not in shown


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path):
    """Compile to PTX without a GPU; computation is in float32, and only gradients are rounded to bfloat16."""
    forward, backward = json.loads(_python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    assert "cvt.rn.bf16" in backward and "cvt.rn.bf16" not in forward
    assert not any(".f64" in each for each in (forward, backward))


# A pass, on a CPU --------------------------------------------------------------------------------------------------


def _model(config):
    shape = Qwen2Config(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, pad_token_id=0,
                        num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    return prepare_for_training(Qwen2ForCausalLM(shape), config.model).train()


def _rows(prompts=(3, 5, 4), old=True):
    names = ["advantages", "ref_log_probs", *(["old_log_probs"] if old else [])]
    draw = np.random.default_rng(0)
    return [
        Row(np.full(n, 7, np.int32), np.arange(4, 6 + n, dtype=np.int32),
            {name: draw.normal(size=2 + n).astype(np.float32) for name in names})
        for n in prompts
    ]  # fmt: skip


class _Reads(TorchDispatchMode):
    """Record operations that synchronize with a GPU: scalars read from it, and results of data-dependent size."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name.startswith("index") and any(
            each is not None and each.dtype == torch.bool for each in (args[1] if isinstance(args[1], list) else ())
        )
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "masked_scatter"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_a_micro_batch_does_not_synchronize_with_its_device(packed, coefficient):
    config = job(actor__entropy_coeff=coefficient, actor__use_kl_loss=True, model__dtype="float32")
    model, rows = _model(config), _rows(old=False)
    batch = collate(rows, packed)
    with _Reads() as reads:
        loss, sums = micro_batch_losses.actor_loss(config, model, batch)
        micro_batch_losses.weighted_loss(loss, 1.0).backward()
        gained = micro_batch_losses.old_log_probs_from_update("actor", rows, batch)
        with torch.no_grad():
            scores = batch.split_later(micro_batch_losses.log_probs(config, model, batch))
    assert reads.found == []
    for have, want, row in zip(gained(), scores(), rows, strict=True):
        assert len(have) == len(row.response_ids)
        np.testing.assert_array_equal(have, want)
    with _Reads() as reads:
        assert micro_batch_losses.read_sums(sums) == {name: float(value) for name, value in sums.items()}
    assert len(reads.found) == len(sums)  # of the right side; read_sums reads all in one transfer
    assert micro_batch_losses.read_sums({"a": torch.tensor(1.0), "b": torch.tensor([2.0])}) == {"a": 1.0, "b": 2.0}
    assert micro_batch_losses.read_sums({}) == {}


def test_logits_are_copied_only_if_prompts_are_shared():
    alone, padded = collate(_rows(), True), collate(_rows(), False)
    shared = collate(_rows((4, 4)), True, shared=True)
    for batch, ordered in ((alone, True), (padded, False), (shared, False)):
        kept = torch.randn(len(batch.inputs["input_ids"]), len(batch.keep), 3)
        found = batch.predictions(kept)
        assert torch.equal(found, kept.flatten(0, 1)[batch.predict])
        assert (found.data_ptr() == kept.data_ptr()) == ordered


@pytest.mark.parametrize("temperature, coefficient", [(1.0, 0.0), (0.7, 0.1)])
def test_a_plan_for_gpus_has_no_second_copy_of_the_logits(tmp_path, temperature, coefficient):
    Qwen2Config(vocab_size=50_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                num_key_value_heads=1, pad_token_id=0).save_pretrained(tmp_path)  # fmt: skip
    model, texts = read_shape(str(tmp_path), "model.path").model, SequenceLengths(((1, 1000),))
    config = job(rollout__temperature=temperature, actor__entropy_coeff=coefficient, model__dtype="bfloat16")
    fused, sliced = (model.work(config, "actor", texts, device).peak for device in ("cuda", "cpu"))
    logits, shared_head = 1000 * 50_000 * 2, 50_000 * 8 * 2
    assert logits <= fused < 1.05 * (logits + shared_head)
    assert sliced > 2 * logits
    config.training.vocabulary_parallel = True  # shares of the vocabulary are computed in slices
    assert model.work(config, "actor", texts, "cuda").peak > 2 * logits


def test_packed_tensors_share_one_buffer():
    tensors = [torch.arange(5), torch.tensor([True, False, True]), torch.randn(2, 3), torch.empty(0, 4), torch.ones(3)]
    buffer = transfers.pack(tensors, pinned=False)
    for have, want in zip(transfers.unpack(buffer, tensors), tensors, strict=True):
        assert have.dtype == want.dtype and torch.equal(have, want)
        assert have.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert all(a is b for a, b in zip(transfers.send_all(tensors, "cpu"), tensors, strict=True))


def test_spans_have_device_times_and_synchronize_once(monkeypatch):
    waits, moments = [], iter([1.0, 3.0, 3.0, 7.0, 8.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(moments)

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

        def synchronize(self):
            waits.append(self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(transfers.clock, "now", lambda: 108.0)
    times, spans = (
        transfers.DeviceTimes("cuda"),
        [Span("forward", "trainer/0", 0.0), Span("backward", "trainer/0", 0.0)],
    )
    for span in spans:
        with times.timed(span):
            pass
    assert waits == []
    times.settle()
    assert waits == [8.0] and [(each.start, each.end) for each in spans] == [(101.0, 103.0), (103.0, 107.0)]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, ""),
        (ModuleNotFoundError("No module named 'triton'"), "ModuleNotFoundError: No module named 'triton'"),
        (RuntimeError("Failed to find C compiler.\nSpecify CC."), "RuntimeError: Failed to find C compiler."),
        (PermissionError(13, "Permission denied", "/cache"), "PermissionError: [Errno 13] Permission denied: '/cache'"),
    ],
    ids=str,
)
def test_a_rank_without_working_triton_uses_torch_log_probs(error, why, monkeypatch, capsys):
    def launch(*_):
        if error:
            raise error

    monkeypatch.setattr(vocabulary_kernels, "forward", launch)
    fused_log_probs.unavailable.cache_clear()
    logits = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("meta"))
    assert fused_log_probs.unavailable("meta") == why
    assert fused_log_probs.is_fused(logits) == (not why)
    assert rank_group.warn_if_unfused({"packed": True, "unfused": why}) == {"packed": True}
    output = capsys.readouterr().err
    assert output.count("\n") == bool(why) and why in output
    fused_log_probs.unavailable.cache_clear()


def test_out_of_memory_in_the_trial_is_raised(monkeypatch):
    def launch(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(vocabulary_kernels, "forward", launch)
    with pytest.raises(torch.OutOfMemoryError):
        fused_log_probs.unavailable("meta")


def test_the_kernels_are_used_only_on_gpus():
    assert not fused_log_probs.is_fused(torch.zeros(1, 3))
    assert not fused_log_probs.is_fused(torch.zeros(1, 3, dtype=torch.float64, device="meta"))
