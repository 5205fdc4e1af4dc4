"""Packed, padded and single-sequence forward passes give the same results."""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlfuse.engines.pipeline.loading import EMBEDDING, HEAD
from rlfuse.engines.trainer.attention import attend_by_layout, attends_by_layout
from rlfuse.engines.trainer.cost_measurement import matmul_parameters
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import packs_exactly, response_logits, response_values
from rlfuse.samples import Row, Visual

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3,
)  # fmt: skip


def rows(seed=0, n=5):
    rng = np.random.default_rng(seed)
    return [
        Row(
            rng.integers(3, 64, rng.integers(1, 9)).astype(np.int32),
            (ids := rng.integers(3, 64, rng.integers(1, 20)).astype(np.int32)),
            {"values": rng.normal(size=len(ids)).astype(np.float32)},
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    "model_class, config_class",
    [(Qwen2ForCausalLM, Qwen2Config), (LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)],
)
def test_packed_and_padded_logits_equal_single_sequences(model_class, config_class):
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL)).eval()
    assert packs_exactly(model, 64, torch.float32, "cpu")
    batch = rows()
    with torch.no_grad():
        packed, padded = (response_logits(model, collate(batch, way)) for way in (True, False))
        alone = []
        for row in batch:
            ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
            alone.append(model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)
    torch.testing.assert_close(padded, torch.cat(alone), atol=1e-5, rtol=0)


def test_values_packed_equal_padded():
    torch.manual_seed(0)
    model = Qwen2ForTokenClassification(Qwen2Config(**SMALL, num_labels=1)).eval()
    with torch.no_grad():
        packed, padded = (response_values(model, collate(rows(), way)) for way in (True, False))
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)


def test_packing_is_refused_for_a_model_that_ignores_position_restarts():
    class Leaky(torch.nn.Module):
        """Mix all earlier tokens of a row, regardless of their positions."""

        def forward(self, input_ids, logits_to_keep, attention_mask=None, **_):
            seen = (input_ids if attention_mask is None else input_ids * attention_mask).cumsum(-1).float()
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return type("Output", (), {"logits": seen[:, keep, None].expand(-1, -1, 64)})

    assert not packs_exactly(Leaky(), 64, torch.float32, "cpu")


def test_matrix_and_split_follow_rows():
    batch = collate(rows(), packed=True)
    flat = torch.arange(len(batch.targets), dtype=torch.float32)
    assert torch.equal(batch.matrix(flat)[batch.mask], flat)
    assert [len(part) for part in batch.split(flat)] == [len(row.response_ids) for row in rows()]
    torch.testing.assert_close(
        batch.tensors["values"][batch.mask], torch.from_numpy(np.concatenate([r.tensors["values"] for r in rows()]))
    )


def grouped_rows(seed=1):
    """Return groups of 3, 1 and 2 responses to one prompt each."""
    rng = np.random.default_rng(seed)
    ids = lambda most: rng.integers(3, 64, rng.integers(1, most)).astype(np.int32)  # noqa: E731
    return [Row(prompt, ids(20), {}) for n in (3, 1, 2) for prompt in [ids(30)] for _ in range(n)]


@pytest.mark.parametrize("window", [None, 5])
def test_shared_prompt_gives_the_same_logits_and_gradients(window):
    """Compare full and sliding-window attention."""
    torch.manual_seed(0)
    sliding = {} if window is None else dict(use_sliding_window=True, sliding_window=window, max_window_layers=1)
    plain = Qwen2ForCausalLM(Qwen2Config(**SMALL, **sliding))
    model = attend_by_layout(copy.deepcopy(plain))
    assert attends_by_layout(model) and not attends_by_layout(plain)
    batch = grouped_rows()
    alone = []
    for row in batch:
        ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        alone.append(plain(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1])
    expected = torch.cat(alone)
    expected.sin().sum().backward()
    unique = sum(len(batch[i].prompt_ids) for i in (0, 3, 4)) + sum(len(row.response_ids) for row in batch)
    for packed, shared in ((True, True), (True, False), (False, False)):
        inputs = collate(batch, packed, shared=shared)
        assert not shared or inputs.inputs["input_ids"].numel() == unique
        found = response_logits(model, inputs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        model.zero_grad()
        found.sin().sum().backward()
        for name, parameter in model.named_parameters():
            wanted = plain.get_parameter(name).grad
            assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm()


@dataclass
class Clip:
    """Embeddings of a clip."""

    key: str
    rows: torch.Tensor

    def read(self, first=0, last=None):
        return self.rows[first:last]


@pytest.mark.parametrize("way", [dict(packed=True), dict(packed=False), dict(packed=True, shared=True)])
def test_visual_embeddings_equal_to_token_embeddings_give_the_same_logits(way):
    """Check also that other embeddings give other logits, and that only prompts with the same clip are shared."""
    torch.manual_seed(0)
    model = attend_by_layout(Qwen2ForCausalLM(Qwen2Config(**SMALL)).eval())
    table, batch, at = model.get_input_embeddings().weight.detach(), grouped_rows(), np.array([1, 2, 3, 5])
    batch = [row for row in batch if len(row.prompt_ids) > 6]

    def shown(row, change=0.0):
        ids = row.prompt_ids.copy()
        ids[at] = 0
        clip = Clip(f"{row.prompt_ids.tobytes()}{change}", table[row.prompt_ids[at]] + change)
        return replace(row, prompt_ids=ids, visual=(Visual(at.astype(np.int32), clip),))

    with torch.no_grad():
        expected = response_logits(model, collate(batch, **way))
        found = response_logits(model, collate([shown(row) for row in batch], **way))
        mixed = response_logits(model, collate([shown(batch[0]), shown(batch[0], 1.0)], **way))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    one, other = mixed.chunk(2)
    torch.testing.assert_close(one, expected[: len(one)], atol=1e-5, rtol=0)
    assert (one - other).abs().max() > 0.01
    wide = replace(batch[0], visual=(Visual(at.astype(np.int32), Clip("wide", torch.zeros(4, 8))),))
    with pytest.raises(ValueError, match=r"shape \[4, 8\] do not fit 4 positions of width 32"):
        response_logits(model, collate([wide], **way))


@dataclass
class Read(Clip):
    """Clip that records the span of each read."""

    spans: list

    def read(self, first=0, last=None):
        self.spans.append((int(first), int(last)))
        return super().read(first, last)


@pytest.mark.parametrize("way", [dict(packed=True), dict(packed=False), dict(packed=True, shared=True)])
def test_ranks_read_only_the_embeddings_of_their_slice(way):
    """Check with three clips in two prompts: together, the ranks read each row once per copy of its prompt."""
    rng, batch_rows, clips = np.random.default_rng(0), [], []
    for tokens, starts in ((60, (5, 40)), (30, (2,))):
        found = [Read(f"{tokens}/{at}", torch.zeros(16, 8), []) for at in starts]
        visual = tuple(Visual(np.arange(at, at + 16, dtype=np.int32), c) for at, c in zip(starts, found, strict=True))
        prompt = rng.integers(3, 50, tokens).astype(np.int32)
        batch_rows += [Row(prompt, rng.integers(3, 50, size).astype(np.int32), visual=visual) for size in (4, 9)]
        clips += found
    for index in range(4):
        batch = collate(batch_rows, **way, part=SimpleNamespace(degree=4, index=index, attend=None))
        for at, embeddings in batch.visual:
            assert 0 < len(at) == len(embeddings) and at.max() < batch.inputs["input_ids"].numel()
    copies = 1 if way.get("shared") else 2
    for clip in clips:
        assert sorted(row for first, last in clip.spans for row in range(first, last)) == sorted([*range(16)] * copies)
        assert len(clip.spans) <= 4 * copies


def test_inputs_that_a_layout_cannot_express_are_refused():
    model = attend_by_layout(Qwen2ForCausalLM(Qwen2Config(**SMALL)))
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="Positions restart within a row, but no `layout`"):
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 0]]))
    with pytest.raises(ValueError, match="would ignore an attention mask"):
        model(input_ids=ids, attention_mask=ids)


@pytest.mark.parametrize(
    ("family", "config", "changes"),
    [
        (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
        (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
        (Qwen2ForTokenClassification, Qwen2Config, {"num_labels": 1}),
        (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_matmul_parameters_match_counted_flops(family, config, changes):
    model, tokens = family(config(**SMALL | {"hidden_size": 128} | changes)), 16
    model.set_experts_implementation("eager")  # the FLOP counter only supports this implementation
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    head = HEAD if HEAD in sizes else EMBEDDING if hasattr(model, "lm_head") else None
    counted = matmul_parameters(sizes, [EMBEDDING], head, model.config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(tokens)[None])
    products = [value for name, value in counter.get_flop_counts()["Global"].items() if "mm" in str(name)]
    assert sum(products) == pytest.approx(2 * tokens * sum(counted), rel=0.02)
