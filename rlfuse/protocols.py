"""Async protocols between the controller and its engines, implemented by Ray actors and by the simulator.

Invariants: every implementation bounds the time of a call and raises `EngineError` with the worker's name; results are
in the order of the arguments; no method modifies the samples it receives.
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
"""Device memory of a rollout engine that can be released and restored separately."""
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; the seed belongs to the sample."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings. Sampled tokens that extend past a stop string are kept."""

    def greedy(self) -> Sampling:
        """Return greedy decoding with the same limit and stop strings."""
        return Sampling(0.0, 1.0, -1, self.max_tokens, stop=self.stop)


@dataclass(frozen=True, slots=True)
class Load:
    """Current load of a rollout engine."""

    running: int
    waiting: int
    kv_use: float
    """Fraction of the KV cache in use, 0 to 1."""
    steps: int = 0
    """Decode steps since the engine was built."""


class Recorded(Protocol):
    """A worker that keeps spans of its work until they are drained."""

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return the spans since the last call. `collect`: collect garbage in its processes first."""


class RolloutEngine(Recorded, Protocol):
    """One vLLM engine on one slot."""

    def generate(
        self, samples: Sequence[Sample], sampling: Sampling, partials: Mapping[str, Partial] | None = None
    ) -> AsyncIterator[tuple[str, Response | Partial]]:
        """Yield (sample id, response) as soon as a sample is finished, in finishing order.

        A sample in `partials` continues from there, and its response includes those tokens. An evicted sample is
        yielded as a `Partial`.
        """

    async def evict(self, sample_ids: Sequence[str], carry: str = "tokens") -> None:
        """Abort these samples; their `generate` yields a `Partial` for each that is not finished.

        `carry`: `kv` stores the KV cache for another engine of the run, `tokens` drops it.
        """

    async def load(self) -> Load: ...

    async def sleep(self, discard: bool = False) -> None:
        """Release the device, for the slot's role `trainer`. No sample may be in progress.

        Like `wake`, a no-op if there is no engine or it already sleeps; a lost engine is reported by the next
        `generate`. `discard`: drop the weights instead of copying them to the host.
        """

    async def wake(self, part: Part | None = None) -> None:
        """Restore device memory, or only that `part`: weights are pushed to an engine without its KV cache.

        `generate` may only be called once all parts are restored.
        """


class RewardScorer(Recorded, Protocol):
    """Reward functions and reward models, in separate processes."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardFailure]: ...


@dataclass(frozen=True, slots=True)
class DeviceSharing:
    """How a slot's engine and its trainer ranks share the device, from the memory plan."""

    alternates: bool = True
    """They use the device alternately; False: both stay resident."""
    max_rank_bytes: int | None = None
    """Bytes that each rank may allocate if both stay resident; None: no limit."""
    max_cached_bytes: int = 0
    """Unused bytes that a rank's allocator may keep while the engine uses the device."""
    max_cached_bytes_in_push: int = 0
    """The same while the engine's weights and the models are both resident."""
    pinned_host_bytes: int = 0
    """Bytes of host memory that each rank's models use while they are offloaded."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """Arrays of a model's pass, float32 [T] per row, and the time at which its first rank began."""

    arrays: list[np.ndarray]
    began: float


class Trainer(Recorded, Protocol):
    """Actor, critic and reference on all trainer ranks. `slot`: only that slot's ranks; None: all of them.

    It also implements `Stages` if `pipelined`, else `WholeModels`.
    """

    @property
    def pipelined(self) -> bool:
        """True if ranks hold pipeline stages: gradients of all models are then one decision (`Train`)."""

    @property
    def lockstep(self) -> bool:
        """True if a forward pass needs all ranks."""

    @property
    def lockstep_backward(self) -> bool:
        """True if a backward pass needs all ranks."""

    async def score(self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None) -> dict[str, PassResult]:
        """Run forward passes of these models over the same rows, one model after the other.

        `actor` and `ref` return log-probs of the response tokens at the sampling temperature, `critic` the value of
        the state before each token.
        """

    async def step(
        self, model: str, lengths: Sequence[int], lr_factor: float = 1.0, skipped: Sequence[int] = ()
    ) -> dict[str, float]:
        """Scale the accumulated gradient by the mini-batch's count, all-reduce, clip, update; return mean metrics.

        `lengths`: tokens in the loss of each row of the mini-batch; `lr_factor`: multiplies the model's learning rate.
        `skipped`: those of `lengths` whose rows were not accumulated since the last step, because their loss and
        gradient are 0; the others were. Metrics are means over the accumulated rows.
        """

    async def probe(self) -> Sequence[float | None]:
        """Measure each slot's speed on a fixed workload, all slots concurrently; higher is faster.

        None for a slot without device memory for the workload.
        """

    async def replan(self, rates: Sequence[float], saved: Path | None = None) -> None:
        """Assign work by these rates (measured over expected time, one per slot) from now on; empty: all equal.

        `saved`: a checkpoint of the present state, from which layers can move between ranks; the ranks hold their
        devices.
        """

    @property
    def offloaded_optimizers(self) -> Mapping[int, float]:
        """Slot whose models are on the device while its optimizer state is offloaded -> seconds to load that state.

        Slots whose state is being loaded are not included.
        """

    async def fetch_optimizers(self, slot: int) -> None:
        """Start loading the slot's optimizer state, concurrently with its other work. A step waits for the state."""

    sharing: DeviceSharing

    async def acquire_device(self, slot: int) -> None:
        """Move the slot's models onto the device (role `trainer`); no-op if they are on it."""

    async def release_device(self, slot: int) -> None:
        """Move the slot's models off the device (role `rollout`); no-op if they are off."""

    saves_in_background: bool
    """True if `save` with `wait=False` may return before files are written."""

    async def save(self, folder: Path, wait: bool = True) -> None:
        """Write `actor/` (which contains `huggingface/`) and `critic/` to `folder`.

        `wait=False`: training may continue once it returns; the folder is complete after `saved`.
        """

    async def is_saving(self) -> bool:
        """Return whether files of the last `save` are still being written."""

    async def saved(self) -> None:
        """Wait until all files of the last `save` are on the disk. NotSaved if one could not be written."""

    async def save_metadata(self, folder: Path) -> None:
        """Write everything that `save` writes, except weights and optimizer state."""

    def discard_gradients(self) -> None:
        """Discard accumulated gradients, because the run ends within a step. Only `save` may follow."""

    async def load(self, folder: Path) -> None:
        """Load a checkpoint that `save` wrote."""


class WholeModels(Protocol):
    """A `Trainer` without pipeline stages: accumulates gradients of any rows and models, on any slot."""

    async def accumulate(
        self, models: Sequence[str], rows: Sequence[Row], slot: int | None = None
    ) -> dict[str, PassResult]:
        """Add the rows' unnormalised gradient (of sums over tokens, which `step` divides) to each model.

        Rows for `actor` have `advantages` and the other inputs of its loss, rows for `critic` `values` and `returns`.
        For rows without `old_log_probs` the actor's forward pass returns them; no other pass returns arrays.
        """

    async def sync_reference(self) -> None:
        """Mix the actor's weights into the reference policy (ref.sync_ref_model); the ranks hold their devices."""


class Stages(Protocol):
    """A `Trainer` whose ranks hold pipeline stages: gradients of all models in one schedule, on all slots."""

    async def train(
        self, rows: Mapping[str, Sequence[Row]], scored: Mapping[str, Sequence[Row]]
    ) -> tuple[dict[str, float], dict[str, list[np.ndarray]], list[np.ndarray]]:
        """Accumulate gradients of all models of `rows` in one pipeline schedule; score `scored` in its bubbles.

        Returns the metrics of the schedule, float32 [T] per scored row of each model, and the arrays that
        `WholeModels.accumulate` returns.
        """


class WeightSync(Protocol):
    """Transfer of weights from the trainer's actor to every rollout engine."""

    async def push(self, version: int) -> None:
        """Load the actor's current weights into all engines as `version`, and give the engines their devices.

        Applies regardless of the devices' previous owner. Prefix caches are reset; lost engines are replaced first.
        """

    async def restart_engine(self, slot: int) -> None:
        """Start a new engine on the slot, with the actor's current weights under the version of the last push.

        Called only when every engine has failed. The engine gets the slot's device regardless of the previous owner.
        """


class Clips(Recorded, Protocol):
    """Vision towers and the embeddings of clips."""

    async def encode(self, groups: Sequence[Group], holder: str, check_failures: bool = True) -> list[Group]:
        """Encode the groups' clips, keep them until `holder` is released, and return the groups that succeeded.

        `check_failures`: raise EngineError if too many clips fail.
        """

    def prefetch(self, prompts: Sequence[Prompt], holder: str) -> None:
        """Start decoding the clips that are probably encoded next, concurrently with the work of `holder`."""

    async def release(self, holder: str) -> dict[str, float]:
        """Release the holder's embeddings; return `video/*` metrics since the last call."""


class NoClips:
    """`Clips` for text-only models."""

    async def encode(self, groups: Sequence[Group], holder: str, check_failures: bool = True) -> list[Group]:
        """Return all groups."""
        return list(groups)

    def prefetch(self, prompts: Sequence[Prompt], holder: str) -> None:
        """Do nothing."""

    async def release(self, holder: str) -> dict[str, float]:
        """Return no metrics."""
        return {}

    async def drain(self, collect: bool = False) -> list[Span]:
        """Return no spans."""
        return []


@dataclass(frozen=True, slots=True)
class Engines:
    """The backends that the controller drives."""

    rollout: Sequence[RolloutEngine]
    reward: RewardScorer
    trainer: Trainer
    weights: WeightSync
    clips: Clips = field(default_factory=NoClips)

    @property
    def recorded(self) -> list[Recorded]:
        """Return all workers that keep spans."""
        return [*self.rollout, self.trainer, self.reward, self.clips]
