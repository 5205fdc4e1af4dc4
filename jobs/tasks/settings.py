"""Settings of the bundled tasks' models and rows, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlfuse.tasks.clips import Clips, Kind
from rlfuse.video.plan import SeedSampling

VERSION = "2"
"""Change it when the code of this package changes what is written: what another version wrote is not used again."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Everything that decides the weights; the key of what is kept is made of it."""

    seed: int = 1
    hidden_size: int = 128
    layers: int = 2
    intermediate_size: int = 384
    """hidden_size is a multiple of 64: heads are of 32 (vLLM's attention on CPUs has no smaller), two per KV head."""
    steps: int = 500
    tokens_per_batch: int = 512
    lr: float = 1.5e-3
    stop_early_small: float = 0.55
    """Share of demonstrations that stop one subtraction early, divisors below `large_divisor`."""
    stop_early_large: float = 0.75
    large_divisor: int = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows, and the seed that chooses them."""

    train: int = 512
    val: int = 64
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Labeller:
    """Who compares answers of the remainder task, and how many pairs."""

    certainty: float = 4.0
    """Log-odds for a right answer over a wrong one of the same length."""
    per_step: float = 0.3
    """Log-odds for each subtraction more, right or not."""
    dimension: str | None = None
    """In which respect it compares; its rows say so."""
    train: int = 4096
    val: int = 512
    seed: int = 1


@dataclass(frozen=True, slots=True)
class JudgeTraining:
    """The judge of two answers, and the pairs that it learns from."""

    seed: int = 1
    hidden_size: int = 64
    intermediate_size: int = 128
    pairs: int = 4096
    first: float = 0.7
    """Share of pairs whose better answer stands first."""
    steps: int = 300
    batch: int = 32
    lr: float = 3e-3


@dataclass(frozen=True, slots=True)
class ClipWarmStart:
    """The same for the model that watches clips or images, and how it sees clips."""

    sampling: SeedSampling = field(default_factory=lambda: SeedSampling(budget=64, levels=(4,)))
    """16 frames of 56 x 56 pixels at most: every event of a clip of three is seen. `experiment=long_video` has the same
    numbers under `video`."""
    seed: int = 1
    heads: int = 4
    layers: int = 2
    tower_heads: int = 2
    tower_layers: int = 1
    steps: int = 130
    batch: int = 16
    lr: float = 1.5e-3
    confuses_green_blue: float = 0.65
    """Share of demonstrations whose answer is green for blue, or blue for green."""
    confuses_red_yellow: float = 0.3


CLIPS = Clips(train=256, val=32, kinds=(Kind.ORDER,), distinct_ends=True)
IMAGES = replace(CLIPS, kinds=(Kind.PLACE,))
