"""Attention of packed, padded and prompt-sharing batches equals transformers' eager attention of single rows."""

import numpy as np
import pytest
import torch
import transformers

from rlfuse.config.schema import ModelConfig
from rlfuse.engines.trainer.attention import attends_by_layout
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import packs_exactly, prepare_for_training, response_logits
from rlfuse.samples import Row

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=3, num_experts=3, moe_intermediate_size=16)
MIXED = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
LAID_OUT = {
    "Gemma2": dict(MIXED, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=5),
    "Gemma3": dict(MIXED, query_pre_attn_scalar=5),
    "GptOss": dict(MIXED, **EXPERTS),
    "Qwen2Moe": dict(EXPERTS, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "Phimoe": dict(EXPERTS, sliding_window=5),
    "Mistral": dict(sliding_window=5),
    "Granite": dict(attention_multiplier=0.5),
}
OTHERS = {
    "Bloom": dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
    "Mpt": dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.3),
    "Falcon": dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3),
    "GPTJ": dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, initializer_range=0.3),
    "Mamba": dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3),
    "Nemotron": SMALL,
    "Doge": SMALL,
    "Llama4": dict(
        SMALL, **EXPERTS, intermediate_size_mlp=32, attention_chunk_size=5, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    ),
}  # fmt: skip


def pair(family: str, settings: dict):
    """Return (model prepared for training, the same model with transformers' eager attention)."""

    def build(**options):
        config = getattr(transformers, f"{family}{'TextConfig' if family in ('Gemma3', 'Llama4') else 'Config'}")
        return getattr(transformers, f"{family}ForCausalLM")._from_config(config(**settings), **options).eval()

    torch.manual_seed(0)
    plain, model = build(attn_implementation="eager"), build()
    for name, parameter in plain.named_parameters():
        if "sinks" in name or ".gate." in name or "router" in name:
            torch.nn.init.normal_(parameter)
    model.load_state_dict(plain.state_dict())
    return prepare_for_training(model, ModelConfig(path="", enable_gradient_checkpointing=False)), plain


def answers() -> list[Row]:
    """Return two rows of one prompt and one of another, all longer than the sliding window."""
    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(3, 64, size).astype(np.int32)  # noqa: E731
    return [Row(prompt, draw(size)) for prompt, sizes in ((draw(9), (7, 12)), (draw(6), (8,))) for size in sizes]


def logits_of_single_rows(model, rows: list[Row]) -> torch.Tensor:
    ids = [torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None] for row in rows]
    return torch.cat([model(x).logits[0, len(row.prompt_ids) - 1 : -1] for x, row in zip(ids, rows, strict=True)])


def scores(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", LAID_OUT)
def test_attention_by_layout_equals_eager_attention(family):
    model, plain = pair(family, SMALL | LAID_OUT[family])
    assert attends_by_layout(model)
    rows = answers()
    expected = scores(logits_of_single_rows(plain, rows))
    expected.sin().sum().backward()
    for way in (dict(packed=True), dict(packed=False), dict(packed=True, shared=True)):
        model.zero_grad()
        found = scores(response_logits(model, collate(rows, **way)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        found.sin().sum().backward()
        for name, parameter in model.named_parameters():
            wanted = plain.get_parameter(name).grad
            assert (parameter.grad - wanted).norm() <= 1e-5 * (1 + wanted.norm()), name


@pytest.mark.parametrize("family", OTHERS)
@torch.no_grad()
def test_families_without_layout_keep_their_attention(family):
    model, plain = pair(family, OTHERS[family])
    assert not attends_by_layout(model)
    rows = answers()
    ways = [False, True] if packs_exactly(model, 64, torch.float32, "cpu") else [False]
    for packed in ways:
        found = scores(response_logits(model, collate(rows, packed)))
        torch.testing.assert_close(found, scores(logits_of_single_rows(plain, rows)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("softcap, sinks", [(None, True), (2.0, False), (2.0, True)])
def test_long_segments_are_scored_in_blocks(softcap, sinks, monkeypatch):
    """Compare with unblocked scores, with windows and a prefix, including gradients of sinks."""
    from rlfuse.engines.trainer import attention
    from rlfuse.engines.trainer.attention import Segment, attend

    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 30, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sink = torch.randn(4, requires_grad=True) if sinks else None
    segments = (Segment(0, 10), Segment(10, 30, prefix=(0, 10)))
    inputs = [x for x in (query, key, value, sink) if x is not None]
    found = []
    for block in (3, 512):
        monkeypatch.setattr(attention, "_BLOCK", block)
        result = attend(query, key, value, segments, None, 6, softcap, sink)
        found.append((result, *torch.autograd.grad(result.square().sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
