"""What the controller knows of engines: small async protocols, implemented by Ray actors and by the simulator alike.

Invariants: every method is bounded in time by its implementation and raises `EngineError` naming the worker; results
come back in the order of the arguments; no method changes the samples it is given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

from rlfuse.events import Span
from rlfuse.samples import Group, Partial, Prompt, Response, Reward, RewardFailure, Row, Sample

Part = Literal["weights", "kv_cache"]
"""Of what a rollout engine holds on its device."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn; the seed belongs to the sample."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end a response; what of the tokens goes beyond them stays, as it was drawn."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a rollout engine holds right now."""

    running: int
    waiting: int
    kv_use: float
    """Share of the KV cache in use, 0 to 1."""
    steps: int = 0
    """That it has done since it was built."""


class Recorded(Protocol):
    """Every engine keeps spans of its work until they are drained."""

    async def drain(self, collect: bool = False) -> list[Span]:
        """Those since the last call. `collect`: its processes collect garbage first, as all others do now."""


class RolloutEngine(Recorded, Protocol):
    """One vLLM engine on one slot."""

    def generate(
        self, samples: Sequence[Sample], sampling: Sampling, partials: Mapping[str, Partial] | None = None
    ) -> AsyncIterator[tuple[str, Response | Partial]]:
        """(sample id, response) for each sample, in finishing order, as soon as each is finished.

        A sample in `partials` goes on from there; its response holds all tokens, those it came with too. A sample that
        is evicted comes as a `Partial`.
        """

    async def evict(self, sample_ids: Sequence[str], carry: str = "tokens") -> None:
        """End these samples here now; their `generate` yields a `Partial` for each that isn't finished.

        `carry`: `kv` puts their KV cache where another engine of the run finds it, `tokens` lets it go.
        """

    async def load(self) -> Load: ...

    async def sleep(self, discard: bool = False) -> None:
        """Give the device up: the slot takes the role `trainer`. Nothing is being generated.

        As `wake`, of no effect where there is no engine, or it has done so already; a loss shows when something is to
        be generated.
        """

    async def wake(self, part: Part | None = None) -> None:
        """Take the device back, or only for the `part` given: weights are pushed to an engine without its KV cache.

        Nothing may be generated before it is all awake.
        """


class RewardScorer(Recorded, Protocol):
    """Reward functions and reward models in processes of their own."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardFailure]: ...


@dataclass(frozen=True, slots=True)
class DeviceSharing:
    """How a slot's engine and its trainer ranks share the device, as the memory plan decides."""

    alternates: bool = True
    """They take turns; False: both stay."""
    max_rank_bytes: int | None = None
    """Bytes that each rank may allocate where both stay; None: no limit."""
    max_cached_bytes: int = 0
    """Unused bytes that a rank's allocator may keep while the engine has the device."""
    max_cached_bytes_in_push: int = 0
    """The same while the engine's weights are there alongside the models."""
    pinned_host_bytes: int = 0
    """Bytes of host memory that each rank's models take while they are off the device."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Arrays that a model's pass returned, float32 [T] per row, and when its first rank began with it."""

    arrays: list[np.ndarray]
    began: float


class Trainer(Recorded, Protocol):
    """Actor, critic and reference over all trainer ranks. `slot`: only that slot's ranks; None: all of them.

    It is also a `Stages` if `pipelined`, else a `WholeModels`.
    """

    @property
    def pipelined(self) -> bool:
        """Whether ranks hold stages, so that gradients of all models are one decision (`Train`)."""

    @property
    def lockstep(self) -> bool:
        """Whether passes need all ranks together."""

    @property
    def lockstep_backward(self) -> bool:
        """Whether gradients need all ranks together."""

    async def score(self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None) -> dict[str, PassResult]:
        """Run passes of these models over the same rows, one after the other.

        Of `actor` and `ref` log-probs of the response tokens at the sampling temperature, of `critic` its value of the
        state before each.
        """

    async def step(self, model: str, lengths: Sequence[int], lr_factor: float = 1.0) -> dict[str, float]:
        """Scale what was accumulated by the mini-batch's count, all-reduce, clip, update; its mean diagnostics.

        `lengths`: trainable tokens of every row that was accumulated since the last step; `lr_factor`: share of the
        model's full learning rate.
        """

    async def probe(self) -> Sequence[float | None]:
        """How fast each slot's ranks do fixed work now, all at the same time: more is faster.

        None of a slot whose device has no room for that.
        """

    async def replan(self, rates: Sequence[float], saved: Path | None = None) -> None:
        """Share work out by these rates of slots from now on: time over expected time; none: all as expected.

        `saved`: a checkpoint of what the ranks hold, which have their devices, so that layers may move between them.
        """

    @property
    def offloaded_optimizers(self) -> Mapping[int, float]:
        """Slot whose ranks have their device, but not what only optimizer steps read -> seconds that this takes to
        come. Without the slots where it is on its way."""

    async def fetch_optimizers(self, slot: int) -> None:
        """It sets out, beside whatever the slot's ranks do. A step that finds it away waits for it."""

    sharing: DeviceSharing

    async def acquire_device(self, slot: int) -> None:
        """The slot's ranks get their models onto the device (role `trainer`), unless they have them there."""

    async def release_device(self, slot: int) -> None:
        """The slot's ranks give the device up (role `rollout`), unless they have."""

    async def save(self, folder: Path) -> None:
        """Write `actor/` (with `huggingface/` inside) and `critic/` below `folder`."""

    async def save_metadata(self, folder: Path) -> None:
        """Write what `save` writes except weights and optimizer state."""

    def discard_gradients(self) -> None:
        """The run ends within a step: what it accumulated is not waited for, and only `save` may follow."""

    async def load(self, folder: Path) -> None:
        """Read what `save` wrote."""


class WholeModels(Protocol):
    """A `Trainer` whose ranks hold whole models: gradients of any rows of one model, on any slot."""

    async def accumulate(
        self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None
    ) -> dict[str, PassResult]:
        """Add the rows' unnormalised gradient to each model: of sums over tokens, which the step divides.

        Rows for `actor` carry `advantages` and what its loss needs, for `critic` `values` and `returns`. Where they
        carry no `old_log_probs`, the actor's forward pass returns them; no other pass returns arrays.
        """


class Stages(Protocol):
    """A `Trainer` whose ranks hold stages of pipelines: gradients of all models in one schedule, on all slots."""

    async def train(
        self, rows: Mapping[str, Sequence[Row]], scored: Mapping[str, Sequence[Row]]
    ) -> tuple[dict[str, float], dict[str, list[np.ndarray]], list[np.ndarray]]:
        """Add gradients of all models of `rows` in one pipeline schedule, whose bubbles score the rows of `scored`.

        Metrics of the schedule, float32 [T] per scored row of each model, and what `WholeModels.accumulate` gives.
        """


class WeightSync(Protocol):
    """From the trainer's actor to every rollout engine."""

    async def push(self, version: int) -> None:
        """All engines hold the actor's present weights as `version` when this returns, and their devices.

        Whoever had these before. Caches are reset; lost engines are replaced first.
        """

    async def restart_engine(self, slot: int) -> None:
        """The slot has another engine, with the actor's present weights under the version of the last push.

        It is asked for where all engines are lost; it gets the slot's device, whoever had that before.
        """


class Clips(Recorded, Protocol):
    """Vision towers and what they made of clips."""

    async def encode(self, groups: Sequence[Group], holder: str, check_failures: bool = True) -> list[Group]:
        """The groups whose prompts can be generated from: clips are encoded, and kept until `holder` is released.

        `check_failures`: EngineError where too many of them can't.
        """

    def prefetch(self, prompts: Sequence[Prompt], beside: str) -> None:
        """Begin with the clips of what is probably encoded next, while what this holder has goes on."""

    async def release(self, holder: str) -> dict[str, float]:
        """They may be forgotten. `video/*` since the last call."""


class NoClips:
    """The `Clips` of a model of text."""

    async def encode(self, groups: Sequence[Group], holder: str, check_failures: bool = True) -> list[Group]:
        """All of them."""
        return list(groups)

    def prefetch(self, prompts: Sequence[Prompt], beside: str) -> None:
        """There is nothing to decode."""

    async def release(self, holder: str) -> dict[str, float]:
        """Nothing was held."""
        return {}

    async def drain(self, collect: bool = False) -> list[Span]:
        """Nothing is recorded."""
        return []


@dataclass(frozen=True, slots=True)
class Engines:
    """The hands of the controller."""

    rollout: Sequence[RolloutEngine]
    reward: RewardScorer
    trainer: Trainer
    weights: WeightSync
    clips: Clips = field(default_factory=NoClips)

    @property
    def recorded(self) -> list[Recorded]:
        """All that keep spans."""
        return [*self.rollout, self.trainer, self.reward, self.clips]
