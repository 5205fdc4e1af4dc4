"""Vision tower trained with the policy: clips are encoded again in the backward pass, from their embeddings' gradients.

A step adds the tower's float32 sums to the actor's gradients (one norm, one optimizer) and copies the new weights
back. The loss uses the same embeddings as rollouts, rounded to bf16: cached ones until the tower is updated within a
step, so PPO's ratio is 1 before an update. The reference uses the initial tower; the critic uses cached embeddings and
does not train them. Only `add_gradients_to` and `copy_weights_from` are collective.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rlfuse.engines.trainer.offloading import on_device
from rlfuse.engines.trainer.sharded_model import ShardedModel
from rlfuse.errors import EngineError, VideoError
from rlfuse.samples import Embedding, Row, Visual
from rlfuse.video.decode_pool import Clip, DecodePool
from rlfuse.video.embedding import content_hash, embedding_key
from rlfuse.video.encoder_rank import EncoderSettings
from rlfuse.video.towers import Tower

SUBMODULE = "tower"
"""Name of the policy's submodule with the tower's weights for the backend."""


@dataclass(frozen=True, slots=True)
class TowerSettings:
    """Settings of the encoder ranks, which trainer ranks must share."""

    encoder: EncoderSettings
    pool: DecodePool
    """Decode pool; each rank starts its own workers."""


class TrainedTower:
    """Trained vision tower of a rank.

    `updates`: optimizer steps so far; `embedded_at`: the number of updates of the tower that encoded the rows'
    embeddings.
    """

    def __init__(self, settings: TowerSettings, device: str, reference: bool):
        encoder = settings.encoder
        tower = (encoder.model_path, device, encoder.dtype, encoder.step)
        self.current = Tower(*tower, trainable=True)
        self.initial = Tower(*tower) if reference else None
        self.pool, self.block_bytes = settings.pool, encoder.block_bytes
        self.device, self.updates, self.embedded_at = device, 0, 0
        self._weights = list(self.current.module.parameters())
        sums = (torch.zeros_like(weight, dtype=torch.float32) for weight in self._weights)
        self.sums = torch.nn.ParameterList(torch.nn.Parameter(each, requires_grad=False) for each in sums)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Modules that are offloaded together with the engines."""
        return [self.current.module, *([self.initial.module] if self.initial else []), self.sums]

    def attach_to(self, policy: PreTrainedModel) -> None:
        """Add the tower's weights to the policy, for its backend to train."""
        policy.add_module(SUBMODULE, copy.deepcopy(self.current.module).to(policy.dtype))

    # Passes ------------------------------------------------------------------------------------------------------

    def rows_of(self, model: str, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return rows with the embeddings for `actor`, `critic` or `ref` in a pass that does not train the tower."""
        tower, updates = self.current, self.updates
        if model == "ref":
            tower, updates = self.initial, 0
        if model == "critic" or updates == self.embedded_at:
            tower = None
        return self._rows(rows, {}, tower, graded=False)

    def rows_with_gradient(self, rows: Sequence[Row]) -> tuple[tuple[Row, ...], list[MicroBatchClip]]:
        """Return rows for the actor's update, and their clips, to pass to `backward` after that of the loss."""
        clips: dict[str, MicroBatchClip] = {}
        rows = self._rows(rows, clips, None if self.updates == self.embedded_at else self.current, graded=True)
        return rows, list(clips.values())

    def backward(self, clips: Iterable[MicroBatchClip]) -> None:
        """Accumulate the tower's gradient from the gradients of these clips' embeddings."""
        for clip in clips:
            for first, at, frames in self._chunks(clip.visual, *clip.span):
                features = self.current.rows(frames, clip.visual.plan, at)
                if (wanted := clip.gradient(first, first + len(features))) is not None:
                    found = torch.autograd.grad(features, self._weights, wanted.to(features), materialize_grads=True)
                    for total, gradient in zip(self.sums, found, strict=True):
                        total.add_(gradient)

    def rows(self, tower: Tower, visual: Visual, first: int, last: int) -> torch.Tensor:
        """Return rows `first` to `last` of a clip's embeddings by `tower`, bf16 [last - first, hidden], without
        gradient."""
        with torch.no_grad():
            found = [
                (row, tower.rows(frames, visual.plan, at).bfloat16())
                for row, at, frames in self._chunks(visual, first, last)
            ]
        begin = found[0][0]
        return torch.cat([part for _, part in found])[first - begin : last - begin]

    def _rows(
        self, rows: Sequence[Row], clips: dict[str, MicroBatchClip | Embedding], tower: Tower | None, graded: bool
    ) -> tuple[Row, ...]:
        """Return rows whose visual embeddings come from `tower`; None: from the cache."""

        def with_source(visual: Visual) -> Visual:
            key = visual.source.key
            if key not in clips:
                self._check(visual)
                encodes_again = graded or tower is not None
                clips[key] = MicroBatchClip(self, visual, tower, graded) if encodes_again else visual.source
            return replace(visual, source=clips[key])

        return tuple(replace(row, visual=tuple(map(with_source, row.visual))) for row in rows)

    def _check(self, visual: Visual) -> None:
        content, plan, key = content_hash(visual.path), visual.plan, visual.source.key

        def made_after(updates: int) -> bool:
            return embedding_key(content, plan, self.current.version_after(updates)) == key

        if made_after(self.embedded_at):
            return
        made = [updates for updates in range(self.updates + 1) if made_after(updates)]
        by = f"by the tower after {made[0]} updates" if made else "from another file, plan or tower"
        raise EngineError(
            f"embedding {key} of {visual.path} was made {by}, but rows need those of the tower after "
            f"{self.embedded_at} updates. Update the encoder ranks' tower after every step before encoding clips"
        )

    def _chunks(self, visual: Visual, first: int, last: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (first row, first frame, frames) of the chunks that the tower encodes for rows `first` to `last`."""
        plan, shape = visual.plan, self.current.shape
        rows = [shape.row(plan, unit) for unit in range(0, shape.units(len(plan.times)), shape.step)]
        begin = (bisect_right(rows, first) - 1) * shape.cut
        end = min(bisect_left(rows, last) * shape.cut, len(plan.times))
        count = shape.cut * max(1, self.block_bytes // (plan.height * plan.width * 3) // shape.cut)
        blocks = [Clip(visual.path, plan, at, min(at + count, end)) for at in range(begin, end, count)]
        for block, pixels in zip(blocks, self.pool.stream(blocks), strict=True):
            if isinstance(pixels, VideoError):
                raise EngineError(f"a clip that was encoded before cannot be decoded again: {pixels}") from pixels
            for number, frames in enumerate(torch.from_numpy(pixels).split(shape.cut), block.first // shape.cut):
                yield rows[number], number * shape.cut, frames

    # Steps -------------------------------------------------------------------------------------------------------

    def add_gradients_to(self, engine: ShardedModel) -> None:
        """Add the accumulated gradients to those of the engine; every rank calls, also one without clips."""
        parameters = list(getattr(engine.module, SUBMODULE).parameters())
        with engine.gathered(parameters):  # the derivative of weight * sum is the sum
            products = (weight * total.to(weight.dtype) for weight, total in zip(parameters, self.sums, strict=True))
            engine.backward(sum(product.sum() for product in products))
        for total in self.sums:
            total.zero_()

    @torch.no_grad()
    def copy_weights_from(self, engine: ShardedModel) -> None:
        """Copy the engine's weights after a step or a load; every rank calls."""
        parameters = list(getattr(engine.module, SUBMODULE).parameters())
        with engine.gathered(parameters) as whole:
            for mine, weight in zip(self._weights, whole, strict=True):
                mine.copy_(weight)
        self.updates = engine.steps

    def write(self, path: Path) -> None:
        """Write the current weights as safetensors under checkpoint names, for `Tower.update`."""
        with on_device(self.current.module):
            weights = self.current.module.state_dict()
            save_file({f"model.{name}": tensor.cpu().contiguous() for name, tensor in weights.items()}, path)


class MicroBatchClip:
    """Source of a clip's embeddings for the rows of one micro-batch, in place of its `Embedding`."""

    def __init__(self, owner: TrainedTower, visual: Visual, tower: Tower | None, graded: bool):
        self.key, self.visual = visual.source.key, visual
        self._owner, self._tower, self._graded = owner, tower, graded
        self._parts: dict[tuple[int, int], torch.Tensor] = {}

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return rows `first` to `last` (exclusive) in the model's dtype; they are kept for `gradient`."""
        part = (int(first), int(last))
        if part not in self._parts:
            cached, tower = self.visual.source, self._tower
            source = cached.read(*part) if tower is None else self._owner.rows(tower, self.visual, *part)
            rows = source.to(self._owner.device, self._owner.current.dtype, copy=True)
            self._parts[part] = rows.requires_grad_(self._graded)
        return self._parts[part]

    @property
    def span(self) -> tuple[int, int]:
        """Range of rows read; (0, 0) if none."""
        firsts, lasts = zip(*(self._parts or {(0, 0): None}), strict=True)
        return min(firsts), max(lasts)

    def gradient(self, first: int, last: int) -> torch.Tensor | None:
        """Return the gradient of these rows, float32 [last - first, hidden]; None if none of them was read."""
        total = None
        for (start, stop), rows in self._parts.items():
            low, high = max(first, start), min(last, stop)
            if low < high:
                if total is None:
                    total = torch.zeros(last - first, rows.shape[-1], device=rows.device)
                total[low - first : high - first] += rows.grad[low - start : high - start]
        return total
