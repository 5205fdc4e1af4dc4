"""The snapshot that a fusion policy sees and the decisions it returns: plain data.

A slot has one role at a time. In `rollout` its engine generates; in `trainer` its rank scores and accumulates
gradients, one call after the other. Rewards are scored in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlfuse.costs.model import Costs
from rlfuse.fusion.states import SampleRecord

Role = Literal["rollout", "trainer"]
PASS_BEFORE_STEP = {"actor": "old_log_prob", "critic": "values"}
"""A model's step waits for the pass that reads the weights it changes, and for all rewards, which may end the run."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Admit what is left of whole groups to a slot: siblings stay together and share their prompt's KV cache."""

    slot: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Take unfinished samples from one engine to another, with their KV cache or to be prefilled again."""

    samples: tuple[str, ...]
    source: int
    target: int
    carry: Literal["kv", "tokens"] = "tokens"


@dataclass(frozen=True, slots=True)
class Switch:
    """Change the role of a slot that is doing nothing."""

    slot: int
    role: Role


@dataclass(frozen=True, slots=True)
class Score:
    """Run one kind of scoring on finished samples: `reward`, or a pass of the slot's rank (None: of all ranks)."""

    kind: str
    samples: tuple[str, ...]
    slot: int | None = None
    also: tuple[str, ...] = ()  # further passes over the same samples in the same call

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind, *self.also)


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add these samples' unnormalised gradient of one model's present mini-batch; slot None: all ranks together."""

    model: str
    samples: tuple[str, ...]
    slot: int | None = None
    also: tuple[str, ...] = ()  # further models that learn from the same samples in the same call

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.also)


@dataclass(frozen=True, slots=True)
class Train:
    """Add these samples' unnormalised gradients, model -> samples, in one pipeline schedule over all ranks."""

    samples: Mapping[str, tuple[str, ...]]
    passes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> samples of later mini-batches


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Scale what one model accumulated and take its optimizer step, on all ranks."""

    model: str
    also: tuple[str, ...] = ()  # further models that take theirs after it

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.also)


Decision = Generate | Move | Switch | Score | Accumulate | Train | OptimizerStep
"""What a policy doesn't mention stays as it is."""


@dataclass(slots=True)
class Slot:
    """A device (or tensor-parallel group) as policies see it, read-only. The progress of its samples is extrapolated
    from the engine's pace and corrected whenever one of them finishes."""

    index: int
    role: Role = "rollout"
    samples: dict[str, SampleRecord] = field(default_factory=dict)  # on its engine
    arriving: int = 0  # samples on their way here; room is kept for them
    reserved: float = 0.0  # tokens that its KV cache will hold when its samples are as long as expected
    context: float = 0.0  # tokens in its KV cache, as of `updated_at`
    steps: float = 0.0  # decoding steps done, as of `updated_at`
    stall: float = 0.0  # seconds of prefill that costs foresee before its next decoding step, as of `updated_at`
    updated_at: float = 0.0
    rate: float = 1.0  # seconds its work takes for each that a typical slot's takes, for plans (`rates`)
    measured_rate: float = 1.0  # seconds per predicted second of its engine, by what finished last
    steps_since_measured: int = 0  # steps since a slow slot was last measured
    busy: bool = False  # scoring, training or changing roles
    alive: bool = True  # whether its engine still runs
    drained: bool = False  # it gets no work of its own; its rank still takes part where all ranks work together

    @property
    def load(self) -> int:
        return len(self.samples) + self.arriving

    @property
    def idle(self) -> bool:
        return not self.load and not self.busy

    def pace(self, costs: Costs, more: int = 0) -> float:
        """Return the seconds of its next decoding step with `more` samples."""
        return costs.decode_step(len(self.samples) + more, self.context) * self.measured_rate

    def decoding(self, now: float) -> float:
        """Return the approximate seconds of decoding since `updated_at`."""
        return max(0.0, now - self.updated_at - self.stall * self.measured_rate)

    def steps_by(self, now: float, costs: Costs) -> float:
        return self.steps + self.decoding(now) / self.pace(costs)

    def tokens(self, sample: SampleRecord, now: float, costs: Costs) -> float:
        return sample.carried + max(0.0, self.steps_by(now, costs) - sample.steps_before)

    def remaining(self, sample: SampleRecord, now: float, costs: Costs) -> float:
        """Estimate the response tokens left; past the expectation, a quarter of those generated."""
        return self._remaining((sample,), now, costs)[0]

    def all_remaining(self, now: float, costs: Costs) -> list[float]:
        return self._remaining(self.samples.values(), now, costs) if self.samples else []

    def _remaining(self, samples: Iterable[SampleRecord], now: float, costs: Costs) -> list[float]:
        # Policies ask it of all samples whenever one has finished: without calls it takes less than half of the time.
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
    """What does not change within a step."""

    samples: int = 0  # samples of the step
    credit_samples: int = 1 << 30  # finished samples that may wait for a kind of scoring; at least 1
    credit_tokens: int = 1 << 40  # the same in tokens
    lockstep: bool = False  # passes without gradients need all ranks together (ZeRO 3)
    lockstep_backward: bool = False  # gradients need all ranks together (ZeRO 2 and 3)
    pipelined: bool = False  # ranks hold stages of the models, which train together in one schedule (`Train`)
    threshold: float = 0.2  # share of samples below which the tail is consolidated; 0: never
    max_decode_slowdown: float = 1.0  # by which factor a decoding step may get longer
    cost_gated: bool = True  # adaptive: samples move only where none ends later by it; else as in rlhfuse, once
    longest_first: bool = True  # adaptive: admit by expected length, where lengths are known from before
    overlapping: bool = True  # adaptive: stages overlap, else as in serial
    early_training: bool = True  # adaptive: free slots accumulate gradients during generation
    max_sequences: int = 1 << 30  # adaptive: samples per slot where lengths are known
    prefill_share: float = 0.0  # share of engines that only prefill; 0: all do both


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where every sample of a step stands. Nothing in it may be changed; mappings are in the order of happening."""

    now: float  # seconds, on the controller's clock
    slots: Sequence[Slot]
    waiting: Mapping[int, int]  # group -> samples of it that no slot has
    expected: Callable[[int], tuple[int, float]]  # group -> (prompt tokens, expected response tokens)
    shortest_first: Sequence[int]
    """Waiting groups (and some admitted ones), the longest last; empty if lengths are unknown."""
    deadline: float  # when generation can be over, if lengths are as expected and slots are shared out ideally
    unfinished: int  # samples without a whole response, waiting ones too
    finished: int  # samples that became whole since the snapshot before
    unscored: Mapping[str, Mapping[str, int]]  # kind -> finished samples without it -> tokens
    deferred: Mapping[str, Mapping[int, Mapping[str, int]]]  # kind -> mini-batch -> samples -> tokens
    backlog: Mapping[str, int]  # kind -> tokens of its unscored samples
    waiting_since: Mapping[str, float]  # kind -> when its last scoring began or its backlog was empty
    ready: Mapping[str, Mapping[str, int]]  # model -> samples whose gradients can be accumulated -> tokens
    ready_to_step: Sequence[str]  # models whose optimizer step can be taken now
    scoring: frozenset[str]  # kinds under way, on slots or (`reward`) beside them
    tokens_to_score: float  # tokens of passes still to be done, unfinished samples as expected
    tokens_to_train: float  # tokens of present mini-batches still to be taken up, counted in the same way
    in_flight: int  # samples on engines or between them
    context: float  # tokens in all KV caches, about
    busy: int  # slots that score, train or change roles
    idle_trainers: Collection[int]  # slots in role `trainer` that do nothing, and may get work
    all_ranks_idle: bool  # whether every slot, drained ones too, is an idle trainer
    idle_engines: Collection[int]  # slots in role `rollout` that hold nothing
    engines_with_room: Collection[int]  # of slots that are not drained
    generating: Collection[int]  # slots that hold samples or are about to, but for drained ones
    slow_engines: Collection[int]  # slots that hold samples and are slow, but for drained ones
    effective_slots: float  # typical slots that all slots make up which are not drained
    ends: Callable[[], list[float]]  # when the calls under way on slots are over, if they take what is foreseen
    prompts_dominate: bool  # whether prompts are most of the tokens
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
"""`Settings` that simulation can tune."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy needs of those who run it."""

    tuned: tuple[str, ...] = ()  # the settings that it reads of those that are tuned by simulation
    trains_early: bool = False  # accumulates gradients while samples are still generated


_TRAITS: dict[Policy, Traits] = {}


def fusion_policy(tuned: tuple[str, ...] = (), trains_early: bool = False) -> Callable[[Policy], Policy]:
    """Register a policy with its traits; its name is the function's."""
    if unknown := [name for name in tuned if name not in TUNABLE]:
        raise ValueError(f"tuned={unknown}: no settings that are tuned; those are {', '.join(TUNABLE)}")

    def register(policy: Policy) -> Policy:
        _TRAITS[policy] = Traits(tuple(tuned), trains_early)
        return policy

    return register


def traits_of(policy: Policy) -> Traits:
    """Those it was registered with; none, if it was not."""
    return _TRAITS.get(getattr(policy, "function", policy), Traits())
