"""Rows as the inputs of a model on one device: packed or padded, prompts shared or not, whole or this rank's slice.

Role: `collate` is called by trainer ranks and pipeline stages. Padding is on the right, where no causal model sees it:
there is no attention mask, positions and layout say everything. Under sequence parallelism all ranks of a group collate
the same rows and cut the same sheet of tokens; what predicts a token is decided before the cut.
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
"""Reads one float32 array per row from the device, and waits for it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on its device. R = trainable response tokens of all rows, B = rows, T = the longest response.

    r = those of the R whose prediction is in this rank's slice; without sequence parallelism all.
    """

    inputs: dict[str, torch.Tensor | Layout]
    """`input_ids` [sequences, tokens]; `position_ids`, of the same shape, or [3, ...] where M-RoPE meets clips; and
    `layout`."""
    predict: torch.Tensor
    """int64 [r]: positions of the flattened kept output that predict each trainable token."""
    targets: torch.Tensor
    """int64 [r]: the trainable tokens."""
    mask: torch.Tensor
    """bool [B, T]: True on trainable tokens; in row-major order its True entries are the R tokens."""
    tensors: dict[str, torch.Tensor]
    """float32 [B, T] per-token arrays of the rows, 0 where masked."""
    places: torch.Tensor
    """int64 [R]: positions of the trainable tokens in a flattened [B, T]."""
    masks: tuple[np.ndarray, ...]
    """bool [T of the row]: the trainable tokens of each row."""
    keep: torch.Tensor
    """int64: columns of the inputs that predict anything; `predict` indexes what is kept."""
    in_order: bool = False
    """Whether `predict` is every kept position, in order."""
    visual: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """(positions of the flattened inputs, the embeddings that stand there instead of the tokens')."""
    own: torch.Tensor | None = None
    """int64 [r]: which of the R, where the ranks of `part` hold slices."""
    part: SequenceSlice | None = None

    def gather_slices(self, flat: torch.Tensor) -> torch.Tensor:
        """[r] -> [R] from all ranks of the slices. Differentiable in this rank's own; the rest are constants.

        So every rank computes the whole loss, and the sum of their gradients is its gradient, whatever the loss does
        with a row's tokens together.
        """
        return flat if self.part is None else self.part.gather_slices(flat, self.own, len(self.places))

    def predictions(self, kept: torch.Tensor) -> torch.Tensor:
        """[sequences, kept columns, ...] -> [r, ...], without a copy where all of them predict one token each."""
        flat = kept.flatten(0, 1)
        return flat if self.in_order else flat[self.predict]

    def matrix(self, flat: torch.Tensor) -> torch.Tensor:
        """[R] -> [B, T], differentiable, 0 where masked."""
        return flat.new_zeros(self.mask.numel()).index_copy(0, self.places, flat).view(self.mask.shape)

    def responses(self, matrix: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [R]"""
        return matrix.flatten()[self.places]

    def split_later(self, flat: torch.Tensor) -> Later:
        """Return a function that reads [R] from the device, as one float32 [T] per row, 0 where not trainable."""
        found, masks = flat.detach().float(), self.masks
        return lambda: per_row(found.cpu().numpy(), masks)

    def split(self, flat: torch.Tensor) -> list[np.ndarray]:
        """[R] -> one float32 [T] per row; waits for the device."""
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
    """Rows as model inputs: packed into one sequence, or each padded to the longest.

    `part`: this rank's slice only. `shared`: neighbouring rows with the same prompt stand behind one copy of it (packed
    and by layout only). `rope`: of a model with 3-D positions. `sizes`: ascending, numbers of tokens to which a packed
    batch is padded where one is large enough and no clip is in the batch; its layout is then a `SegmentTable`.
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
    """A batch's tokens, one after the other, before any cut."""

    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    """[tokens] each, or [3, tokens]."""
    segments: list[Segment] = field(default_factory=list)
    predict: list[np.ndarray] = field(default_factory=list)
    """Where each trainable token is predicted, row by row."""
    clips: list[tuple[int, Visual]] = field(default_factory=list)
    """Where the prompt begins that the embeddings belong to."""
    size: int = 0

    def add(self, ids: np.ndarray, positions: np.ndarray, prefix: tuple[int, int] | None = None) -> int:
        """A segment of tokens; where it starts."""
        start, self.size = self.size, self.size + len(ids)
        self.ids.append(ids)
        self.positions.append(positions)
        self.segments.append(Segment(start, self.size, prefix))
        return start

    def fill(self, size: int, longest: int) -> None:
        """Padding up to `size`; it sees itself only. Its positions are below `longest`, as models may have no more."""
        if count := max(0, size - self.size):
            axes = self.positions[-1].shape[:-1]
            self.add(np.zeros(count, dtype=np.int32), np.broadcast_to(np.arange(count) % longest, (*axes, count)))


def _sheet_of(rows: Sequence[Row], packed: bool, degree: int, shared: bool, rope: MRope | None) -> _Sheet:
    sheet, width = _Sheet(), _up(max(row.tokens for row in rows), degree)
    rope = rope if any(row.visual for row in rows) else None  # of text, all axes are one
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
    """The columns [low, high) of a sheet of so many rows, and what is predicted there."""

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
        """[..., tokens] each -> [..., rows, columns] of this cut."""
        whole = np.concatenate(parts, axis=-1)
        cells = whole.reshape(*whole.shape[:-1], self._rows, self._row)
        return cells[..., self._low : self._low + self._width]

    def visual(self) -> list[tuple[np.ndarray, torch.Tensor]]:
        """Positions in the flattened cut and their embeddings; of a long clip only those that stand here are read."""
        found = []
        for start, visual in self._sheet.clips:
            at = start + visual.positions.astype(np.int64)
            inside = np.flatnonzero(self._inside(at))  # in one piece: positions ascend within a row of the sheet
            if len(inside):
                here = at[inside]
                local = here // self._row * self._width + here % self._row - self._low
                found.append((local, visual.source.read(inside[0], inside[-1] + 1)))
        return found

    def _inside(self, at: np.ndarray) -> np.ndarray:
        columns = at % self._row
        return (self._low <= columns) & (columns < self._low + self._width)
