"""Load the vision tower of a video model alone, and encode frames.

Features equal those of the Hugging Face model with its processor. A clip is run `step` units at a time from its start,
so parts split at multiples of `cut` frames are bit-equal to the whole clip.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from rlfuse.errors import VideoError
from rlfuse.samples import FramePlan
from rlfuse.tensor_files import map_tensors, safetensors_files
from rlfuse.video.models.base import VideoFamily, embedding_width, family_of, known_families
from rlfuse.video.sharding import CostModel

WHOLE = "processor_config.json"
PROCESSOR_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of a tower, for planning and sharding in the driver."""

    hidden: int
    """Features of a token: the text model's input embedding, and those of DeepStack layers."""
    patch: int
    merge: int
    """A token of a clip covers merge x merge patches; images may have another merge."""
    temporal_patch: int
    step: int
    """Units per forward pass; more use a GPU better, but make the sharding coarser."""
    cost: CostModel

    @property
    def cut(self) -> int:
        return self.step * self.temporal_patch

    def units(self, frames: int) -> int:
        return -(-frames // self.temporal_patch)

    def blocks(self, plan: FramePlan, first: int, last: int, most_bytes: int) -> list[tuple[int, int]]:
        """Split frames `first` to `last` (exclusive) into blocks of at most `most_bytes`, but at least `cut` frames."""
        count = max(self.cut, most_bytes // (plan.height * plan.width * 3) // self.cut * self.cut)
        return list(pairwise([*range(first, last, count), last]))

    def unit_patches(self, height: int, width: int, merge: int | None = None) -> int:
        """Return the patches of one unit; sides must be multiples of patch times merge (for instance 14 * 2 pixels)."""
        side = self.patch * (merge or self.merge)
        if height < side or width < side or height % side or width % side:
            raise ValueError(f"frames of {height}x{width} pixels: both sides must be positive multiples of {side}")
        return (height // self.patch) * (width // self.patch)

    def unit_tokens(self, plan: FramePlan) -> int:
        return self.unit_patches(plan.height, plan.width, plan.merge) // plan.merge**2

    def row(self, plan: FramePlan, unit: int) -> int:
        token = unit * self.unit_tokens(plan)
        return token if plan.kept is None else plan.kept.count(1, 0, token)


@dataclass(frozen=True, slots=True)
class Pixels:
    """Pixel normalisation of the model's processor: (value * rescale - mean) / std per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float

    @classmethod
    def of(cls, folder: Path) -> Pixels:
        settings = processor_settings(folder)
        try:
            return cls(
                tuple(settings["image_mean"]), tuple(settings["image_std"]), settings.get("rescale_factor", 1 / 255)
            )
        except KeyError as error:
            raise ValueError(
                f"{folder}: its processor configuration has no {error}, which the tower's input needs"
            ) from None

    def normalise(self, frames: torch.Tensor) -> torch.Tensor:
        """Normalise uint8 [F, H, W, 3] to float32 [F, 3, H, W], in the processor's order of operations."""
        mean, std = (
            (torch.tensor(values, device=frames.device) * (1.0 / self.rescale))[:, None, None]
            for values in (self.mean, self.std)
        )
        return frames.permute(0, 3, 1, 2).to(torch.float32).sub(mean).div_(std)


class Tower:
    """Vision tower on one device."""

    def __init__(
        self, folder: str | Path, device: str = "cpu", dtype: str = "float32", step: int = 1, trainable: bool = False
    ):
        if step < 1:
            raise ValueError(f"step must be at least 1 unit, got step={step}")
        folder = Path(folder)
        config, family = _family(folder)
        patch = config.vision_config.patch_size
        self.device, self.dtype, self.trainable = device, getattr(torch, dtype), trainable
        self.shape = TowerShape(
            embedding_width(config), patch, family.merge, family.temporal_patch, step, family.cost(config)
        )
        self.pixels = Pixels.of(folder)
        self.module = _load(family, config, folder, self.dtype).to(device).requires_grad_(trainable).eval()
        self._weights = self._digest()
        self._updates = 0

    @property
    def version(self) -> str:
        """Hash of weights, normalisation, dtype and shape, plus `+n` after n updates of the weights."""
        return self.version_after(self._updates)

    def version_after(self, updates: int) -> str:
        return self._weights + (f"+{updates}" if updates else "")

    def encode(self, frames: torch.Tensor, merge: int | None = None) -> torch.Tensor:
        """Encode uint8 [F, H, W, 3] to [tokens, hidden]; an incomplete unit repeats its last frame."""
        merge = merge or self.shape.merge
        if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
            raise ValueError(f"frames must be uint8 [F >= 1, H, W, 3], got {frames.dtype} {list(frames.shape)}")
        self.shape.unit_patches(*frames.shape[1:3], merge)
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            return torch.cat([self._run(part.to(self.device), merge) for part in frames.split(self.shape.cut)])

    def rows(self, frames: torch.Tensor, plan: FramePlan, first: int) -> torch.Tensor:
        """Encode the plan's frames from `first` on; return the rows of the tokens that the plan keeps."""
        rows, token = self.encode(frames, plan.merge), first // self.shape.temporal_patch * self.shape.unit_tokens(plan)
        if plan.kept is None:
            return rows
        return rows[torch.tensor([*plan.kept[token : token + len(rows)]], dtype=torch.bool)]

    def update(self, weights: Path, updates: int) -> None:
        """Load weights written by a trainer (safetensors, checkpoint names) after `updates` updates."""
        self.module.load_state_dict({_own(name): tensor for name, tensor in map_tensors(weights)})
        self._updates = updates

    def _run(self, frames: torch.Tensor, merge: int) -> torch.Tensor:
        pixels = self.pixels.normalise(frames)
        if missing := -len(pixels) % self.shape.temporal_patch:
            pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
        patches, grid = self._patches(pixels, merge)
        return self.module(patches.to(self.dtype), grid, merge)

    def _patches(self, pixels: torch.Tensor, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([patches, 3 * time * patch * patch], grid [1, 3]) of [F, 3, H, W], grouped by token."""
        time, side = self.shape.temporal_patch, self.shape.patch
        count, channels, height, width = pixels.shape
        units, rows, columns = count // time, height // side, width // side
        split = pixels.reshape(units, time, channels, rows // merge, merge, side, columns // merge, merge, side)
        unit, frame, channel, row, in_row, y, column, in_column, x = range(9)
        ordered = split.permute(unit, row, column, in_row, in_column, channel, frame, y, x)
        return ordered.flatten(5).flatten(0, 4), torch.tensor([[units, rows, columns]], device=pixels.device)

    def _digest(self) -> str:
        digest = hashlib.sha256(repr((self.pixels, self.dtype, self.shape)).encode())
        for name, tensor in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:32]


def _family(folder: Path) -> tuple[PreTrainedConfig, type[VideoFamily]]:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model at {folder}: it has no config.json")
    config = AutoConfig.from_pretrained(folder)
    if (family := family_of(config)) is None:
        raise ValueError(f"{folder} is a {config.model_type} model; supported vision towers: {known_families()}")
    return config, family


def processor_settings(folder: Path) -> dict:
    """Return the video processor's settings, or the image processor's if there is no other."""
    if (found := _nested(folder, "video_processor")) is not None:
        return found
    for file in map(folder.joinpath, PROCESSOR_FILES):
        if file.is_file():
            return json.loads(file.read_text())
    raise FileNotFoundError(
        f"{folder} has no processor configuration ({', '.join((WHOLE, *PROCESSOR_FILES))}): copy it from the "
        "base model; it defines the normalisation of pixels"
    )


def image_settings(folder: Path) -> dict:
    """Return the image processor's settings. VideoError if it normalises differently than the video processor."""
    file = folder / PROCESSOR_FILES[1]
    found = _nested(folder, "image_processor") or (json.loads(file.read_text()) if file.is_file() else {})
    clips = processor_settings(folder)
    for name in ("image_mean", "image_std", "rescale_factor"):
        if name in found and name in clips and found[name] != clips[name]:
            problem = f"{folder}: {name} is {found[name]} for images and {clips[name]} for clips"
            raise VideoError(problem, "Give both the same in its processor configuration")
    return found


def _nested(folder: Path, name: str) -> dict | None:
    whole = folder / WHOLE
    return json.loads(whole.read_text()).get(name) if whole.is_file() else None


def _own(name: str) -> str:
    """Return a checkpoint tensor's name in the tower; older checkpoints lack the leading `model.`."""
    return name.removeprefix("model.")


def _load(family: type[VideoFamily], config: PreTrainedConfig, folder: Path, dtype: torch.dtype) -> VideoFamily:
    module = family(config).to(dtype)
    saved = {_own(name): tensor for file in safetensors_files(folder) for name, tensor in map_tensors(file)}
    found = {name: tensor for name, tensor in saved.items() if name.startswith(family.tower_prefixes)}
    wanted = module.state_dict().keys()
    if found.keys() != wanted:
        missing, extra = sorted(wanted - found.keys()), sorted(found.keys() - wanted)
        raise ValueError(
            f"{folder}: the tower does not match config.json: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} unknown {extra[:3]}"
        )
    module.load_state_dict(found)
    return module
