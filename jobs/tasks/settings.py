"""Settings of the bundled tasks' models and rows, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlfuse.tasks.clips import Clips, Kind
from rlfuse.video.plan import SeedSampling

VERSION = "2"
"""Increase it when code changes the written files: folders of other versions are rebuilt."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the quickstart's policy; they determine its weights."""

    seed: int = 1
    hidden_size: int = 128
    layers: int = 2
    intermediate_size: int = 384
    """hidden_size must be a multiple of 64: the head size is 32 (vLLM's minimum on CPUs), two heads share a KV head."""
    steps: int = 500
    tokens_per_batch: int = 512
    lr: float = 1.5e-3
    stop_early_small: float = 0.55
    """Fraction of demonstrations that stop one subtraction early, for divisors below `large_divisor`."""
    stop_early_large: float = 0.75
    large_divisor: int = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """Number of rows, and their seed."""

    train: int = 512
    val: int = 64
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Demonstrations(Rows):
    """Number of demonstrations, and their seed."""

    train: int = 2048
    val: int = 256


@dataclass(frozen=True, slots=True)
class Labeller:
    """Settings of the preference labeller and its pairs."""

    certainty: float = 4.0
    """Log-odds of a right answer against a wrong one of the same length."""
    per_step: float = 0.3
    """Log-odds of each additional subtraction, right or not."""
    dimension: str | None = None
    """Label of its rows, for reward models with several dimensions."""
    train: int = 4096
    val: int = 512
    seed: int = 1


@dataclass(frozen=True, slots=True)
class JudgeTraining:
    """Settings of the pairwise judge and its training pairs."""

    seed: int = 1
    hidden_size: int = 64
    intermediate_size: int = 128
    pairs: int = 4096
    first: float = 0.7
    """Fraction of pairs whose better answer comes first."""
    steps: int = 300
    batch: int = 32
    lr: float = 3e-3


@dataclass(frozen=True, slots=True)
class ClipWarmStart:
    """Settings of the video model's warm start, and of its sampling."""

    sampling: SeedSampling = field(default_factory=lambda: SeedSampling(budget=64, levels=(4,)))
    """At most 16 frames of 56 x 56 pixels, which show every event of a clip with three. `experiment=long_video` has the
    same values under `video`."""
    seed: int = 1
    heads: int = 4
    layers: int = 2
    tower_heads: int = 2
    tower_layers: int = 1
    steps: int = 130
    batch: int = 16
    lr: float = 1.5e-3
    confuses_green_blue: float = 0.65
    """Fraction of demonstrations that confuse green and blue in the answer."""
    confuses_red_yellow: float = 0.3


CLIPS = Clips(train=256, val=32, kinds=(Kind.ORDER,), distinct_ends=True)
IMAGES = replace(CLIPS, kinds=(Kind.PLACE,))
