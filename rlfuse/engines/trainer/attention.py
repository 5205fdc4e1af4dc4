"""Attention of trained and scored models, defined by a layout of segments instead of a mask of all token pairs.

A `Layout` splits a batch into causal segments that cover all tokens in order, each optionally with a shared prefix:
packed rows compute nothing across rows, and one prompt serves all its responses. Window, softcap (Gemma-2) and sinks
(GPT-OSS) are applied or rejected, never ignored. Models without attention interface (Bloom, Falcon, MPT, GPT-J) or
with chunked or linear attention (Llama-4, Qwen3-Next) keep transformers' attention and get no layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils

from rlfuse.engines.trainer.transfers import send

NAME = "rlfuse"
_BLOCK = 512  # queries per masked call, which bounds the rows of a mask
_KINDS = {"full_attention", "sliding_attention"}
_NO_LAYOUT = {"doge", "nemotron"}
"""Model types whose attention interface builds its own masks or does not pass the layout to the layers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of the flattened batch; each attends to itself, earlier ones here, and all of `prefix`."""

    start: int
    stop: int
    prefix: tuple[int, int] | None = None
    """[start, stop) of an earlier segment that precedes this one in its sequence."""


@dataclass(frozen=True, slots=True)
class Window:
    """Replaces the mask of layers with sliding-window attention over `size` tokens, including the token itself."""

    size: int


@dataclass(frozen=True, slots=True)
class Block:
    """Block of queries of a segment and the keys they may attend to; its mask is built on use and not kept."""

    row: int
    """Position of the first query."""
    column: int
    """Position of the first key."""
    window: int | None

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask [queries, keys], True where a query attends to a key."""
        rows = torch.arange(self.row, self.row + len(query), device=query.device)[:, None]
        columns = torch.arange(self.column, self.column + len(key), device=query.device)[None]
        seen = columns <= rows
        return seen if self.window is None else seen & (columns > rows - self.window)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Segments as a tensor whose shape depends only on the number of tokens, as CUDA graphs require."""

    rows: Tensor
    """int64 [3, tokens]: each token's segment, the segment of its prefix (-1: none), its position in its sequence."""
    window: int | None = None

    def mask(self, *_: Tensor) -> Tensor:
        """Return the mask [tokens, tokens], True where a query attends to a key; quadratic in the batch's tokens."""
        segment, prefix, position = self.rows
        seen = ((segment[:, None] == segment) | (prefix[:, None] == segment)).tril()
        return seen if self.window is None else seen & (position > position[:, None] - self.window)

    @staticmethod
    def of(segments: tuple[Segment, ...], positions: np.ndarray) -> np.ndarray:
        """Return `rows` for these segments; `positions`: position of each token in its sequence."""
        place = {(segment.start, segment.stop): number for number, segment in enumerate(segments)}
        prefixes = [place.get(segment.prefix, -1) for segment in segments]
        lengths = [segment.stop - segment.start for segment in segments]
        return np.stack([np.repeat(np.arange(len(segments)), lengths), np.repeat(prefixes, lengths), positions])


@dataclass(frozen=True, slots=True)
class Layout:
    """Attention pattern of one batch."""

    segments: tuple[Segment, ...] | SegmentTable
    spread: Callable[..., Tensor] | None = None
    """`attend` over all ranks with slices of the tokens; None if this rank has all tokens."""


def attend_by_layout(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` attend by layouts; an unsupported model keeps its attention and layouts are removed from its
    inputs."""
    text = model.config.get_text_config()
    plain = set(getattr(text, "layer_types", None) or _KINDS) <= _KINDS and text.model_type not in _NO_LAYOUT
    if model.is_backend_compatible() and plain:
        model.set_attn_implementation(NAME)
    else:
        for module in (model, model.base_model):
            module.register_forward_pre_hook(_without_layout, with_kwargs=True)
    return model


def attends_by_layout(model: PreTrainedModel) -> bool:
    """Return whether `model` attends by layouts."""
    return model.config.get_text_config()._attn_implementation == NAME


def _without_layout(_: torch.nn.Module, positional: tuple, named: dict) -> tuple[tuple, dict]:
    return positional, {name: value for name, value in named.items() if name != "layout"}


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in every layer: [B, heads, tokens, d] each -> [B, tokens, heads,
    d]."""
    layout = layout or _whole_rows(query.shape, others.get("position_ids"))
    if isinstance(attention_mask, Tensor) or others.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__} builds its own mask or bias, which layouts do not support.")
    window = attention_mask.size if attention_mask else sliding_window
    over = layout.spread or attend
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    return over(*inputs, layout.segments, scaling, window, softcap, s_aux), None


def _whole_rows(shape: torch.Size, positions: Tensor | None) -> Layout:
    """Return the layout of inputs without one: every row of [B, heads, tokens, d] is one sequence."""
    if positions is not None and (positions.diff() != 1).any():
        raise ValueError("Positions restart within a row, but no `layout` is given. Use `collate` to build the batch.")
    rows, tokens = shape[0], shape[2]
    return Layout(tuple(Segment(row * tokens, (row + 1) * tokens) for row in range(rows)))


def _mask(
    *_: object,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **__: object,
) -> Window | None:
    """Return the `attention_mask` of the layers. `use_vmap`: the model defines its own mask function."""
    if attention_mask is not None:
        raise ValueError("This model attends by a layout and would ignore an attention mask. Remove it.")
    if use_vmap:
        raise NotImplementedError("This model defines its own mask function, which layouts do not support.")
    return Window(local_size) if local_size else None


def _mask_arguments(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any,
    position_ids: Tensor | None,
    *others: Any,
    **named: Any,
) -> tuple:
    """Call transformers' function without its search for restarting positions, which waits for the device in each pass.

    `_mask` would ignore the result, as layouts define attention.
    """
    if config._attn_implementation == NAME:
        position_ids = None
    return _their_mask_arguments(config, inputs_embeds, attention_mask, past_key_values, position_ids, *others, **named)


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, _mask)
_their_mask_arguments = masking_utils._preprocess_mask_arguments
masking_utils._preprocess_mask_arguments = _mask_arguments


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...] | SegmentTable,
    scale: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of [B, tokens, heads, d] inputs within segments; returns the shape of `query`.

    `window`: tokens that a token attends to, including itself; None: all. Heads of `key` divide those of `query`.
    `softcap`: bound of the scores. `sinks`: per head, a score that takes part in the softmax but has no value.
    """
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    scored = partial(_recomputed, scale, softcap, sinks) if softcap is not None or sinks is not None else None
    if isinstance(segments, SegmentTable):
        flat[1:] = (x.repeat_interleave(query.shape[2] // x.shape[1], dim=1) for x in flat[1:])
        attended = (scored or partial(_attention, scale))(*flat, replace(segments, window=window))
    elif scored:
        attended = _by_segment(*flat, segments, window, scored, whole=False)
    elif query.is_cuda and query.dtype != torch.float32:
        attended = _varlen(*flat, segments, scale, window)
    else:
        attended = _by_segment(*flat, segments, window, partial(_attention, scale))
    return attended.view(*query.shape[:3], value.shape[-1])


def _by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[Segment, ...],
    window: int | None,
    run: Callable[[Tensor, Tensor, Tensor, Block | None], Tensor],
    whole: bool = True,
) -> Tensor:
    """Call `run` for each segment in blocks; with `whole`, with None (plain causal) for segments that need no block."""
    # One split has one copy as its gradient; each slice would have a gradient of the size of all tokens.
    lengths = [segment.stop - segment.start for segment in segments]
    queries, keys, values = (x.split(lengths) for x in (query, key, value))
    place = {(segment.start, segment.stop): number for number, segment in enumerate(segments)}
    outputs = []
    for segment, q, k, v in zip(segments, queries, keys, values, strict=True):
        if whole and segment.prefix is None and (window is None or len(q) <= window):
            outputs.append(run(q, k, v, None))
            continue
        if segment.prefix is not None:
            k, v = (torch.cat((x[place[segment.prefix]], own)) for x, own in ((keys, k), (values, v)))
        before = len(k) - len(q)
        for start in range(0, len(q), _BLOCK):
            stop = min(start + _BLOCK, len(q))
            first = 0 if window is None else max(0, before + start + 1 - window)
            seen = slice(first, before + stop)
            outputs.append(run(q[start:stop], k[seen], v[seen], Block(before + start, first, window)))
    return torch.cat(outputs)


def _attention(
    scale: float | None, query: Tensor, key: Tensor, value: Tensor, block: Block | SegmentTable | None
) -> Tensor:
    """Compute attention of [tokens, heads, d] inputs; causal unless `block` is given."""
    mask = None if block is None else block.mask(query, key)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    result = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return result[0].transpose(0, 1)


def _recomputed(*arguments: Any) -> Tensor:
    """Call `_scored`, recomputing scores in the backward pass: those of all blocks would be quadratic in the tokens."""
    return checkpoint(_scored, *arguments, use_reentrant=False, preserve_rng_state=False)


def _scored(
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: Block | SegmentTable,
) -> Tensor:
    """Compute attention of [tokens, heads, d] inputs with softcap or sinks, which torch's kernels do not support."""
    tokens, heads, width = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~block.mask(query, key), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(heads, tokens, 1)), dim=-1)
    shares = scores.softmax(-1)[..., : len(key)].to(value.dtype)
    return torch.einsum("hqk,khd->qhd", shares, value)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float | None, window: int | None
) -> Tensor:
    """Compute all segments in one call of flash attention, which aligns its causal mask to the last query and key."""
    from torch.nn.attention.varlen import varlen_attn

    queries, keys, longest, seen, columns = _offsets(segments, query.device)
    if columns is not None:
        key, value = key[columns], value[columns]
    sizes = (-1 if window is None else window - 1, 0)
    return varlen_attn(query, key, value, queries, keys, longest, seen, scale=scale, window_size=sizes, enable_gqa=True)


@lru_cache(maxsize=4)
def _offsets(segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, Tensor, int, int, Tensor | None]:
    """Return cumulative numbers of queries and keys, their maxima, and with prefixes the token of each key; cached for
    all layers."""
    own = torch.tensor([segment.stop - segment.start for segment in segments])
    prefixes = torch.tensor([s.prefix[1] - s.prefix[0] if s.prefix else 0 for s in segments])
    columns = None
    if prefixes.any():
        spans = [span for s in segments for span in (s.prefix or (0, 0), (s.start, s.stop))]
        columns = send(torch.cat([torch.arange(*span) for span in spans]), device)

    def cumulative(lengths: Tensor) -> Tensor:
        return send(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), device)

    seen = own + prefixes
    return cumulative(own), cumulative(seen), int(own.max()), int(seen.max()), columns
