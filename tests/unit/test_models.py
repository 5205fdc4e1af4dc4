"""Packed, padded and one-by-one forward passes give the same numbers."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlfuse.engines.models import collate, packs_exactly, response_logits, response_values
from rlfuse.samples import Row

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
def test_packed_and_padded_logits_equal_each_sequence_alone(model_class, config_class):
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
        """Mixes all earlier tokens of a row, whatever their positions say."""

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
