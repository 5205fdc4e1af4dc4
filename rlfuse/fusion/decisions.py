"""The snapshot that a fusion policy receives and the decisions that it returns: plain data.

A slot has one role at a time. In `rollout` its engine generates; in `trainer` its rank scores and accumulates
gradients, one call at a time. Rewards are scored in separate processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlfuse.costs.model import Costs
from rlfuse.fusion.states import SampleRecord

Role = Literal["rollout", "trainer"]
PASS_BEFORE_STEP = {"actor": "old_log_prob", "critic": "values"}
"""Model -> the pass that must finish before its optimizer step, as it reads the weights that the step changes. A step
also waits for all rewards, because a reward error may end the run."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Admit the waiting samples of whole groups to a slot, so that the samples of a prompt share its KV cache."""

    slot: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Move unfinished samples between engines: with their KV cache, or as tokens that are prefilled again."""

    samples: tuple[str, ...]
    source: int
    target: int
    carry: Literal["kv", "tokens"] = "tokens"


@dataclass(frozen=True, slots=True)
class Switch:
    """Change the role of an idle slot."""

    slot: int
    role: Role


@dataclass(frozen=True, slots=True)
class Score:
    """Score finished samples: `reward`, or a per-token pass on the slot's rank (slot None: on all ranks)."""

    kind: str
    samples: tuple[str, ...]
    slot: int | None = None
    also: tuple[str, ...] = ()  # more passes over the same samples, run in the same call

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind, *self.also)


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Accumulate the unnormalised gradients of samples of the current mini-batch; slot None: on all ranks."""

    model: str
    samples: tuple[str, ...]
    slot: int | None = None
    also: tuple[str, ...] = ()  # more models trained on the same samples in the same call

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.also)


@dataclass(frozen=True, slots=True)
class Train:
    """Accumulate unnormalised gradients, model -> samples, in one pipeline schedule over all ranks."""

    samples: Mapping[str, tuple[str, ...]]
    passes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> samples of later mini-batches


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Scale the accumulated gradients of a model and run its optimizer step, on all ranks."""

    model: str
    also: tuple[str, ...] = ()  # more models, stepped after it

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.also)


Decision = Generate | Move | Switch | Score | Accumulate | Train | OptimizerStep
"""Work that a policy does not mention continues unchanged."""


@dataclass(slots=True)
class Slot:
    """One device (or tensor-parallel group) of a snapshot, read-only.

    The progress of its samples is extrapolated from the engine's pace and corrected whenever one of them finishes.
    """

    index: int
    role: Role = "rollout"
    samples: dict[str, SampleRecord] = field(default_factory=dict)  # on its engine
    arriving: int = 0  # samples that are moving here; capacity is reserved for them
    reserved: float = 0.0  # tokens of KV cache that its samples need at their expected lengths
    context: float = 0.0  # tokens in its KV cache at `updated_at`
    steps: float = 0.0  # decoding steps done at `updated_at`
    stall: float = 0.0  # predicted seconds of prefill before its next decoding step, at `updated_at`
    updated_at: float = 0.0  # seconds, on the controller's clock
    rate: float = 1.0  # relative time of its work, 1 for a typical slot; used for plans (`costs.rates`)
    measured_rate: float = 1.0  # measured over predicted decoding time of its engine, from the latest measurement
    steps_since_measured: int = 0  # steps since this slow slot was last measured
    busy: bool = False  # scoring, training or changing roles
    alive: bool = True  # its engine is running
    drained: bool = False  # it gets no work, except calls that involve all ranks

    @property
    def load(self) -> int:
        return len(self.samples) + self.arriving

    @property
    def idle(self) -> bool:
        return not self.load and not self.busy

    def pace(self, costs: Costs, more: int = 0) -> float:
        """Return the seconds of its next decoding step with `more` additional samples."""
        return costs.decode_step(len(self.samples) + more, self.context) * self.measured_rate

    def decoding(self, now: float) -> float:
        """Estimate the seconds of decoding since `updated_at`."""
        return max(0.0, now - self.updated_at - self.stall * self.measured_rate)

    def steps_by(self, now: float, costs: Costs) -> float:
        return self.steps + self.decoding(now) / self.pace(costs)

    def tokens(self, sample: SampleRecord, now: float, costs: Costs) -> float:
        return sample.carried + max(0.0, self.steps_by(now, costs) - sample.steps_before)

    def remaining(self, sample: SampleRecord, now: float, costs: Costs) -> float:
        """Estimate the remaining response tokens; beyond the expected length, a quarter of the generated tokens."""
        return self._remaining((sample,), now, costs)[0]

    def all_remaining(self, now: float, costs: Costs) -> list[float]:
        return self._remaining(self.samples.values(), now, costs) if self.samples else []

    def _remaining(self, samples: Iterable[SampleRecord], now: float, costs: Costs) -> list[float]:
        # Policies call this for all samples whenever one finishes; without inner function calls it is over 2x faster.
        steps, most, found = self.steps_by(now, costs), costs.max_tokens, []
        for sample in samples:
            done = steps - sample.steps_before
            tokens = sample.carried + (done if done > 0 else 0.0)
            left, quarter = sample.expected - tokens, tokens / 4
            left = left if left > quarter else quarter
            left = left if left < most - tokens else most - tokens
            found.append(left if left > 1 else 1.0)
        return found


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that are constant within a step."""

    samples: int = 0  # samples of the step
    credit_samples: int = 1 << 30  # maximum finished samples that wait for one kind of scoring; at least 1
    credit_tokens: int = 1 << 40  # maximum tokens of such samples
    lockstep: bool = False  # forward-only passes involve all ranks (ZeRO 3)
    lockstep_backward: bool = False  # gradients involve all ranks (ZeRO 2 and 3)
    pipelined: bool = False  # ranks hold pipeline stages; models train in one schedule (`Train`)
    threshold: float = 0.2  # fraction of unfinished samples below which the tail is consolidated; 0: never
    max_decode_slowdown: float = 1.0  # maximum factor by which consolidation may lengthen a decoding step
    cost_gated: bool = True  # adaptive: move samples only if none finishes later; else once, as `rlhfuse`
    longest_first: bool = True  # adaptive: admit by expected length, if lengths are known from earlier steps
    overlapping: bool = True  # adaptive: overlap stages; else behave as `serial`
    early_training: bool = True  # adaptive: idle slots accumulate gradients during generation
    max_sequences: int = 1 << 30  # adaptive: maximum samples per slot, if lengths are known
    prefill_share: float = 0.0  # fraction of engines that only prefill; 0: every engine prefills and decodes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of every sample and slot of a step, read-only. Mappings are in chronological order."""

    now: float  # seconds, on the controller's clock
    slots: Sequence[Slot]
    waiting: Mapping[int, int]  # group -> number of its samples that are not on a slot
    expected: Callable[[int], tuple[int, float]]  # group -> (prompt tokens, expected response tokens)
    shortest_first: Sequence[int]
    """Waiting groups (and some admitted ones) by expected length; empty if lengths are unknown."""
    deadline: float  # earliest end of generation, given the expected lengths and ideal load balance
    unfinished: int  # samples without a complete response, including waiting ones
    finished: int  # samples finished since the previous snapshot
    unscored: Mapping[str, Mapping[str, int]]  # kind -> finished samples without that score -> tokens
    deferred: Mapping[str, Mapping[int, Mapping[str, int]]]  # kind -> later mini-batch -> samples -> tokens
    backlog: Mapping[str, int]  # kind -> tokens of its unscored samples
    waiting_since: Mapping[str, float]  # kind -> time when its last call ended or its first sample was queued
    ready: Mapping[str, Mapping[str, int]]  # model -> samples whose gradients can be accumulated now -> tokens
    ready_to_step: Sequence[str]  # models whose optimizer step can run now
    scoring: frozenset[str]  # kinds with a running call (`reward` runs in separate processes)
    tokens_to_score: float  # tokens of remaining passes, with expected lengths of unfinished samples
    tokens_to_train: float  # remaining tokens of the current mini-batches, estimated likewise
    in_flight: int  # samples on engines or moving between them
    context: float  # approximate tokens in all KV caches
    busy: int  # number of slots that score, train or change roles
    idle_trainers: Collection[int]  # idle slots in role `trainer`, without drained ones
    all_ranks_idle: bool  # every slot, including drained ones, is an idle trainer
    idle_engines: Collection[int]  # slots in role `rollout` without samples
    engines_with_room: Collection[int]  # slots whose engine can admit more; not drained ones
    generating: Collection[int]  # slots with samples, or with samples moving to them; not drained ones
    slow_engines: Collection[int]  # slow slots with samples; not drained ones
    effective_slots: float  # combined speed of all slots that are not drained, in typical slots
    ends: Callable[[], list[float]]  # predicted end times of the running calls on slots
    prompts_dominate: bool  # prompts are most of the tokens, so samples of a prompt are scored in one call
    costs: Costs
    settings: Settings


Policy = Callable[[Snapshot], list[Decision]]


TUNABLE = (
    "threshold",
    "max_decode_slowdown",
    "cost_gated",
    "longest_first",
    "max_sequences",
    "overlapping",
    "early_training",
)
"""Names of the `Settings` that are tuned by simulation."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a policy that its caller needs to know."""

    tuned: tuple[str, ...] = ()  # the tunable settings that it reads
    trains_early: bool = False  # it accumulates gradients while samples are still being generated


_TRAITS: dict[Policy, Traits] = {}


def fusion_policy(tuned: tuple[str, ...] = (), trains_early: bool = False) -> Callable[[Policy], Policy]:
    """Decorate a policy to register its traits. The policy is named after the function."""
    if unknown := [name for name in tuned if name not in TUNABLE]:
        raise ValueError(f"tuned={unknown}: not tunable settings; use {', '.join(TUNABLE)}")

    def register(policy: Policy) -> Policy:
        _TRAITS[policy] = Traits(tuple(tuned), trains_early)
        return policy

    return register


def traits_of(policy: Policy) -> Traits:
    """Return the traits that the policy was registered with, or the defaults."""
    return _TRAITS.get(getattr(policy, "function", policy), Traits())
