"""Training state by parameter name: weights and optimizer moments, written under one layout and read under any other.

Each rank writes its own `Part`s of parameters, without communication, to `state_<rank>.safetensors`: one-dimensional
float32 tensors `<field>/<parameter>`, with their positions in the metadata. It reads the parts that it needs from the
files of all ranks; under the same layout they are bitwise equal.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlfuse.engines.trainer.saving import CheckpointWriter
from rlfuse.errors import EngineError

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 4 * len((WEIGHT, *MOMENTS))
"""Size of the state of a trained parameter after the first step, in float32."""
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Name of a head -> name under which it is saved if it is the embedding."""


@dataclass(frozen=True, slots=True)
class Share:
    """Share `index` of `degree` equal ones along dimension `dim` of a parameter."""

    index: int = 0
    degree: int = 1
    dim: int = 0


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a parameter, or of a share of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the share."""
    start: int
    """Position of the first element in the flattened share."""
    tensors: Mapping[str, torch.Tensor]
    """Field (WEIGHT, MOMENTS) -> float32 [elements], a view of the state. No moments before the first step."""
    share: Share = WHOLE
    steps: int = 0
    """Number of optimizer steps in the moments."""
    is_tied_copy: bool = False
    """True for a head that is a copy of the embedding: read under its name or that of the embedding, not written."""


def save(folder: Path, rank: int, parts: Iterable[Part], updates: int, files: CheckpointWriter) -> None:
    """Write a rank's parts. `updates`: number of optimizer steps of the model, including skipped ones."""
    tensors: dict[str, torch.Tensor] = {}
    positions: dict[str, Any] = {}
    for part in parts:
        tensors |= {f"{name}/{part.name}": tensor.cpu().contiguous() for name, tensor in part.tensors.items()}
        at = {"shape": part.shape, "start": part.start, "share": asdict(part.share), "steps": part.steps}
        positions[part.name] = at
    metadata = {"parts": json.dumps(positions), "updates": str(updates)}
    path = folder / f"state_{rank}.safetensors"
    files.write(path, lambda: (folder.mkdir(parents=True, exist_ok=True), save_file(tensors, path, metadata)))


@dataclass(frozen=True, slots=True)
class _Saved:
    """Position of a part in the files."""

    file: Any
    """The open file, from `safe_open`: opening one takes milliseconds, as its header lists all tensors."""
    name: str
    """Name of the parameter in the file."""
    shape: tuple[int, ...]
    start: int
    share: Share
    steps: int


@dataclass(slots=True)
class SavedState:
    """State in the files of all ranks. FileNotFoundError if there are none."""

    folder: Path
    updates: int = 0
    _parts: dict[str, list[_Saved]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for file in sorted(self.folder.glob("state_*.safetensors")):
            opened = safe_open(file, "pt")
            metadata = opened.metadata()
            self.updates = max(self.updates, int(metadata["updates"]))
            for name, at in json.loads(metadata["parts"]).items():
                saved = _Saved(opened, name, tuple(at["shape"]), at["start"], Share(**at["share"]), at["steps"])
                self._parts[name].append(saved)
        if not self._parts:
            raise FileNotFoundError(f"{self.folder} has no state to resume from. Use a checkpoint of this version.")

    def steps(self, name: str) -> int:
        """Return the number of optimizer steps in a parameter's moments; 0 if it has none."""
        return self._find(name)[0].steps

    def read(self, field: str, part: Part) -> torch.Tensor:
        """Return the values of a field for the elements of `part`, float32 [elements]."""
        saved = [each for each in self._find(part.name) if each.share == part.share and each.shape == part.shape]
        count = next(iter(part.tensors.values())).numel()
        if saved:
            return self._elements(field, part.name, saved, part.start, count)
        whole = self._whole(field, part.name)
        own = whole.chunk(part.share.degree, part.share.dim)[part.share.index] if part.share.degree > 1 else whole
        if tuple(own.shape) != tuple(part.shape):
            raise EngineError(
                f"{self.folder} has {part.name} with shape {list(whole.shape)}, this model's is {list(part.shape)} "
                f"(share {part.share.index + 1} of {part.share.degree}). Use a checkpoint of the same model."
            )
        return own.flatten()[part.start : part.start + count]

    def _find(self, name: str) -> Sequence[_Saved]:
        found = self._parts.get(name) or self._parts.get(TIED.get(name, name))
        if not found:
            raise FileNotFoundError(f"{self.folder} has no {name}. Use a checkpoint of the same model.")
        return found

    def _whole(self, field: str, name: str) -> torch.Tensor:
        by_share: dict[Share, list[_Saved]] = defaultdict(list)
        for each in self._find(name):
            by_share[each.share].append(each)
        shares = sorted(by_share, key=lambda share: share.index)
        parts = []
        for share in shares:
            shape = by_share[share][0].shape
            parts.append(self._elements(field, name, by_share[share], 0, prod(shape)).view(shape))
        if len(parts) < shares[0].degree:
            raise FileNotFoundError(f"{self.folder} lacks shares of {name}: it has {len(parts)} of {shares[0].degree}.")
        return parts[0] if len(parts) == 1 else torch.cat(parts, shares[0].dim)

    def _elements(self, field: str, name: str, saved: Iterable[_Saved], start: int, count: int) -> torch.Tensor:
        found, end, filled = torch.empty(count), start + count, 0
        for first, values in _overlapping(field, saved, start, end):
            found[first - start : first - start + len(values)] = values
            filled += len(values)
        if filled < count:
            raise FileNotFoundError(f"{self.folder} has only {filled} of {count} values of {field}/{name}.")
        return found


def _overlapping(field: str, saved: Iterable[_Saved], start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position, values) of the saved elements in a range."""
    for each in saved:
        values = each.file.get_slice(f"{field}/{each.name}")
        (size,) = values.get_shape()
        first, last = max(start, each.start), min(end, each.start + size)
        if first < last:
            yield first, values[first - each.start : last - each.start]
