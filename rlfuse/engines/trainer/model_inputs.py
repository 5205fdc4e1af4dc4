"""Collation of rows into model inputs: packed or padded, with or without shared prompts, whole or this rank's slice.

Padding is on the right, so causal models need no attention mask; positions and layout define attention. Under sequence
parallelism all ranks of a group collate the same rows and slice the same sheet of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlfuse.engines.trainer.attention import Layout, Segment, SegmentTable
from rlfuse.engines.trainer.transfers import send, send_all
from rlfuse.samples import Row, Visual, flattened, padded, per_row
from rlfuse.video.positions import MRope, following

if TYPE_CHECKING:
    from rlfuse.engines.trainer.sequence_parallel import SequenceSlice

Later = Callable[[], list[np.ndarray]]
"""Function that waits for the device and returns one float32 array per row."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Micro-batch on its device. R = trainable response tokens of all rows, B = rows, T = longest response.

    r = number of the R tokens that are predicted in this rank's slice; R without sequence parallelism.
    """

    inputs: dict[str, torch.Tensor | Layout]
    """`input_ids` [sequences, tokens]; `position_ids` of the same shape, or [3, ...] for M-RoPE with clips;
    `layout`."""
    predict: torch.Tensor
    """int64 [r]: positions in the flattened kept output that predict each trainable token."""
    targets: torch.Tensor
    """int64 [r]: the trainable tokens."""
    mask: torch.Tensor
    """bool [B, T]: True on trainable tokens; its True entries in row-major order are the R tokens."""
    tensors: dict[str, torch.Tensor]
    """float32 [B, T] per-token arrays of the rows, 0 where masked."""
    places: torch.Tensor
    """int64 [R]: positions of the trainable tokens in a flattened [B, T]."""
    masks: tuple[np.ndarray, ...]
    """For each row, bool [T of the row]: its trainable tokens."""
    keep: torch.Tensor
    """int64: columns of the inputs that predict a token (logits_to_keep); `predict` indexes the kept columns."""
    in_order: bool = False
    """True if `predict` is every kept position, in order."""
    visual: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """(positions in the flattened inputs, visual embeddings that replace the token embeddings there)."""
    own: torch.Tensor | None = None
    """int64 [r]: indices into the R tokens, if ranks hold slices."""
    part: SequenceSlice | None = None

    def gather_slices(self, flat: torch.Tensor) -> torch.Tensor:
        """Gather [r] of all ranks with slices to [R]; differentiable in this rank's entries, the rest are constants.

        So every rank computes the whole loss, and the ranks' gradients sum to its gradient for any loss over a row.
        """
        return flat if self.part is None else self.part.gather_slices(flat, self.own, len(self.places))

    def predictions(self, kept: torch.Tensor) -> torch.Tensor:
        """Select [r, ...] from [sequences, kept columns, ...]; without a copy if every kept position predicts one
        token."""
        flat = kept.flatten(0, 1)
        return flat if self.in_order else flat[self.predict]

    def matrix(self, flat: torch.Tensor) -> torch.Tensor:
        """Scatter [R] to [B, T], 0 where masked; differentiable."""
        return flat.new_zeros(self.mask.numel()).index_copy(0, self.places, flat).view(self.mask.shape)

    def responses(self, matrix: torch.Tensor) -> torch.Tensor:
        """Select [R] from [B, T]."""
        return matrix.flatten()[self.places]

    def split_later(self, flat: torch.Tensor) -> Later:
        """Return a function that reads [R] from the device, as one float32 [T] per row, 0 where not trainable."""
        found, masks = flat.detach().float(), self.masks
        return lambda: per_row(found.cpu().numpy(), masks)

    def split(self, flat: torch.Tensor) -> list[np.ndarray]:
        """Return [R] as one float32 [T] per row; waits for the device."""
        return self.split_later(flat)()


def collate(
    rows: Sequence[Row],
    packed: bool,
    device: torch.device | str = "cpu",
    part: SequenceSlice | None = None,
    shared: bool = False,
    rope: MRope | None = None,
    sizes: Sequence[int] = (),
) -> Batch:
    """Collate rows: packed into one sequence, or each padded to the longest.

    `part`: slice to return; None: all. `shared`: neighbouring rows with the same prompt share one copy of it (requires
    packing and layouts). `rope`: M-RoPE of the model, if any. `sizes`: token counts, ascending; a packed batch without
    clips is padded to the smallest that fits, and its layout is then a `SegmentTable`.
    """
    masks = tuple(row.mask for row in rows)
    mask = torch.from_numpy(padded(masks, masks, bool))
    tensors = {name: torch.from_numpy(padded([row.tensors[name] for row in rows], masks)) for name in rows[0].tensors}
    sheet = _sheet_of(rows, packed, part.degree if part else 1, shared, rope)
    if size := None if sheet.clips else next((size for size in sizes if size >= sheet.size), None):
        sheet.fill(size, max(row.tokens for row in rows))
    cut = _Cut(sheet, 1 if packed else len(rows), part)
    targets = flattened([row.response_ids for row in rows], masks)[cut.own]
    arrays = [cut.columns(sheet.ids), cut.columns(sheet.positions), cut.predict, targets, cut.keep]
    segments = tuple(sheet.segments)
    table = SegmentTable.of(segments, np.concatenate(sheet.positions, axis=-1)) if size else np.empty(0)
    arrays += [np.flatnonzero(mask.numpy()), cut.own, table]
    integers = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
    ids, positions, predict, targets, keep, places, own, table, mask, *values = send_all(
        [*integers, mask, *tensors.values()], device
    )
    return Batch(
        {
            "input_ids": ids,
            "position_ids": positions,
            "layout": Layout(SegmentTable(table) if size else segments, part.attend if part else None),
        },
        predict,
        targets,
        mask,
        dict(zip(tensors, values, strict=True)),
        places,
        masks,
        keep,
        np.array_equal(cut.predict, np.arange((1 if packed else len(rows)) * len(cut.keep))),
        tuple((send(torch.from_numpy(at), device), send(each, device)) for at, each in cut.visual()),
        own if part else None,
        part,
    )


@dataclass(slots=True)
class _Sheet:
    """A batch's concatenated tokens, before slicing."""

    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    """Arrays [tokens] or [3, tokens]."""
    segments: list[Segment] = field(default_factory=list)
    predict: list[np.ndarray] = field(default_factory=list)
    """By row, positions that predict each trainable token."""
    clips: list[tuple[int, Visual]] = field(default_factory=list)
    """(start of the prompt, visual embeddings of it)."""
    size: int = 0

    def add(self, ids: np.ndarray, positions: np.ndarray, prefix: tuple[int, int] | None = None) -> int:
        """Append a segment of tokens; return its start."""
        start, self.size = self.size, self.size + len(ids)
        self.ids.append(ids)
        self.positions.append(positions)
        self.segments.append(Segment(start, self.size, prefix))
        return start

    def fill(self, size: int, longest: int) -> None:
        """Pad up to `size` with a separate segment; its positions are below `longest`, as models may have no more."""
        if count := max(0, size - self.size):
            axes = self.positions[-1].shape[:-1]
            self.add(np.zeros(count, dtype=np.int32), np.broadcast_to(np.arange(count) % longest, (*axes, count)))


def _sheet_of(rows: Sequence[Row], packed: bool, degree: int, shared: bool, rope: MRope | None) -> _Sheet:
    sheet, width = _Sheet(), _up(max(row.tokens for row in rows), degree)
    rope = rope if any(row.visual for row in rows) else None  # for text all axes are equal
    for number, (_, family) in enumerate(groupby(enumerate(rows), lambda x: x[1].prompt_key if shared else x[0])):
        siblings = [row for _, row in family]
        prompt = siblings[0].prompt_ids
        at = np.arange(len(prompt)) if rope is None else rope.positions(len(prompt), siblings[0].visual)
        sheet.clips += [(sheet.size, visual) for visual in siblings[0].visual]
        if len(siblings) == 1:
            response = siblings[0].response_ids
            behind = following(at, len(response))
            start = sheet.add(np.concatenate([prompt, response]), np.concatenate([at, behind], axis=-1))
            sheet.predict.append(start + len(prompt) - 1 + np.flatnonzero(siblings[0].mask))
        else:
            start = sheet.add(prompt, at)
            prefix = (start, start + len(prompt))
            for row in siblings:
                begin = sheet.add(row.response_ids, following(at, len(row.response_ids)), prefix)
                before = np.concatenate([[prefix[1] - 1], begin + np.arange(len(row.response_ids) - 1)])
                sheet.predict.append(before[row.mask])
        if not packed:
            sheet.fill((number + 1) * width, width)
    sheet.fill(_up(sheet.size, degree), width)
    return sheet


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class _Cut:
    """Slice [low, high) of the columns of a sheet with `rows` rows, and the predictions in it."""

    def __init__(self, sheet: _Sheet, rows: int, part: SequenceSlice | None):
        self._sheet, self._rows, self._row = sheet, rows, sheet.size // rows
        degree, index = (part.degree, part.index) if part else (1, 0)
        self._width = self._row // degree
        self._low = index * self._width
        predict = np.concatenate(sheet.predict)
        self.own = np.flatnonzero(self._inside(predict))
        columns = predict[self.own] % self._row - self._low
        self.keep = np.unique(columns)
        self.predict = predict[self.own] // self._row * len(self.keep) + np.searchsorted(self.keep, columns)

    def columns(self, parts: list[np.ndarray]) -> np.ndarray:
        """Concatenate [..., tokens] arrays and return this slice, [..., rows, columns]."""
        whole = np.concatenate(parts, axis=-1)
        cells = whole.reshape(*whole.shape[:-1], self._rows, self._row)
        return cells[..., self._low : self._low + self._width]

    def visual(self) -> list[tuple[np.ndarray, torch.Tensor]]:
        """Return (positions in the flattened slice, their embeddings) of each clip; reads only the embeddings
        needed."""
        found = []
        for start, visual in self._sheet.clips:
            at = start + visual.positions.astype(np.int64)
            inside = np.flatnonzero(self._inside(at))  # contiguous, as positions ascend within a row of the sheet
            if len(inside):
                here = at[inside]
                local = here // self._row * self._width + here % self._row - self._low
                found.append((local, visual.source.read(inside[0], inside[-1] + 1)))
        return found

    def _inside(self, at: np.ndarray) -> np.ndarray:
        columns = at % self._row
        return (self._low <= columns) & (columns < self._low + self._width)
