"""A workload: a machine, its costs and the samples of one training step, read from JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from rlfuse.config.input_files import (
    FLAG,
    AtLeastZero,
    Count,
    Index,
    Positive,
    WorkloadError,
    number,
    one_of,
    read,
    read_json,
)
from rlfuse.costs.model import Costs
from rlfuse.fusion.decisions import Settings
from rlfuse.simulate.speed import Speed

BETWEEN_PROMPTS = 0.7
"""Share of the variance of log-lengths between prompts; the rest is between samples of one prompt."""

MAX_SLOTS, MAX_SAMPLES, MAX_TOKENS, MAX_EPOCHS = 10_000, 1_000_000, 10_000_000, 1_000
"""Limits of a workload, set by memory and simulation time. Tokens are per prompt or response."""
MAX_SECONDS = 1_000_000_000  # limit of times, at which float sums are still precise enough
Seconds = Annotated[float, number(most=MAX_SECONDS)]
Tokens = Annotated[int, number(1, whole=True, most=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class Engine:
    """One rollout engine; the cost terms are those of `Costs`."""

    step_base_s: Annotated[float, number(above=True, most=MAX_SECONDS)] = 0.02
    step_per_sequence_s: Seconds = 1e-4
    step_per_context_token_s: Seconds = 2e-8
    flat_batch: Count = 64
    max_sequences: Count = 256
    kv_tokens: Count = 400_000
    prefill_tokens_per_s: Positive = 20_000.0


@dataclass(frozen=True, slots=True)
class Scoring:
    """Forward passes over every sample, one for each of `kinds`."""

    tokens_per_s: Positive = 40_000.0
    call_s: Seconds = 0.0
    kinds: tuple[Annotated[str, one_of("old_log_prob", "ref", "values")], ...] = ("old_log_prob",)
    deferred: Annotated[bool, FLAG] = False
    """True if log-probs are computed in the pipeline bubbles of their mini-batch."""
    by_update: Annotated[bool, FLAG] = False
    """True if `old_log_prob` of the first mini-batch comes from its own update, without a pass."""


@dataclass(frozen=True, slots=True)
class Training:
    """Forward and backward of each of `models` over every sample, `epochs` times."""

    tokens_per_s: Positive = 8_000.0
    mini_batches: Count = 1
    """Optimizer steps per epoch, each over ceil(prompts / mini_batches) consecutive prompts."""
    call_s: Seconds = 0.0
    optimizer_s: Seconds = 0.0
    models: tuple[Annotated[str, one_of("critic", "actor")], ...] = ("actor",)
    epochs: Annotated[int, number(1, whole=True, most=MAX_EPOCHS)] = 1
    early: Annotated[bool, FLAG] = True
    """True if the actor can train on a group before all groups are finished; false if advantages are normalised over
    the batch."""
    critic_early: Annotated[bool, FLAG] = True
    """The same for the critic; false if a custom estimator reads the whole batch, or with dynamic sampling."""
    bubbles: AtLeastZero | None = None
    """Idle time of the pipeline schedule relative to its work. null: no pipeline, ranks hold whole models."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal lengths: median, and sigma of the natural logarithm."""

    median: Annotated[float, number(1, most=MAX_TOKENS)]
    sigma: Annotated[float, number(most=10)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """`count` lengths drawn from a distribution, capped at `cap`."""

    lognormal: Lognormal
    count: Annotated[int, number(1, whole=True, most=MAX_SAMPLES)]
    cap: Tokens | None = None

    def draw(self, group: int, seed: int) -> np.ndarray:
        """Return int64 [count]: lengths, correlated between samples of the same prompt."""
        rng, sigma = np.random.default_rng(seed), self.lognormal.sigma
        prompts = rng.normal(0.0, sigma * BETWEEN_PROMPTS**0.5, self.count // group).repeat(group)
        siblings = rng.normal(0.0, sigma * (1 - BETWEEN_PROMPTS) ** 0.5, self.count)
        with np.errstate(over="ignore"):
            lengths = np.rint(self.lognormal.median * np.exp(prompts + siblings))
        return np.clip(lengths, 1, self.cap or MAX_TOKENS).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Failure:
    """The rollout engine of a slot fails at this time; its trainer rank keeps running."""

    slot: Index
    at_s: Seconds


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Work of a slot is slower by a factor of `rate` between two times of the step; overlapping slowdowns multiply."""

    slot: Index
    rate: Annotated[float, number(0.001, most=1000)]
    from_s: Seconds = 0.0
    until_s: Seconds | None = None
    """null: until the end."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step on one machine. Raises WorkloadError for inconsistent fields."""

    slots: Annotated[int, number(1, whole=True, most=MAX_SLOTS)]
    response_tokens: tuple[Tokens, ...] | Drawn
    """A length for each sample, or the distribution to draw them from."""
    seed: Index = 0
    prompt_tokens: Tokens = 128
    group: Count = 1
    """Samples per prompt: `rollout.n`, plus 1 with `baselines`."""
    baselines: Annotated[bool, FLAG] = False
    """True if the last sample of each prompt is the baseline (ReMax), which is generated and rewarded only."""
    engine: Engine = field(default_factory=Engine)
    scoring: Scoring = field(default_factory=Scoring)
    training: Training = field(default_factory=Training)
    switch_s: Seconds = 0.0
    """Seconds to switch a slot between rollout and training, in either direction."""
    move_s: Seconds = 0.02
    """Seconds to remove samples from an engine, without their prefill or transfer."""
    step_s: Seconds = 0.0
    """Fixed seconds of a training step, including the weight update."""
    kv_bytes_per_token: AtLeastZero = 0.0
    link_bytes_per_s: AtLeastZero = 0.0
    """Bandwidth between the KV caches of two slots; 0: moved samples are prefilled again."""
    lockstep: Annotated[str, one_of("none", "gradients", "all")] = "none"
    """Work that all slots do in lockstep: `none`, `gradients` (ZeRO 2) or `all` (ZeRO 3, Ulysses, pipelines)."""
    credit_samples: Count | None = None
    """Finished samples that may wait for one kind of scoring before admission stops. null: unlimited."""
    slot_speed: tuple[Annotated[float, number(0.001, most=1000)], ...] = ()
    """Speed factor of each slot; at 0.5 work takes twice as long. Empty: all 1."""
    decode_speed: tuple[Annotated[float, number(0.001, most=1000)], ...] = ()
    """Additional speed factor of each slot's decoding, for example for its memory bandwidth. Empty: all 1."""
    slowdowns: tuple[Slowdown, ...] = ()
    failures: tuple[Failure, ...] = ()
    restart_s: Seconds = 30.0
    """Seconds to start a replacement engine when all engines have failed."""
    length_history_sigma: Annotated[float, number(most=10)] | None = None
    """Accuracy of length predictions: the predicted length of a prompt is its mean length times lognormal(0, sigma).
    null: only the mean over all samples is known."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise WorkloadError(*problems)

    def _problems(self) -> Iterator[str]:
        if not self.samples:
            yield "response_tokens=[]: at least one length is required"
        if self.samples > MAX_SAMPLES:
            yield f"response_tokens has {self.samples:,} lengths: the maximum is {MAX_SAMPLES:,}"
        if not self.training.models:
            yield "training.models=[]: a step trains at least one model; omit it for ['actor']"
        if self.training.bubbles is not None and self.lockstep != "all":
            yield f"lockstep={self.lockstep!r}: must be 'all' for pipelines (training.bubbles)"
        if self.scoring.deferred and self.training.bubbles is None:
            yield "scoring.deferred=true: requires a pipeline; set training.bubbles, or omit it"
        if self.scoring.by_update and ("old_log_prob" not in self.scoring.kinds or "actor" not in self.training.models):
            yield (
                "scoring.by_update=true: requires 'old_log_prob' in scoring.kinds and 'actor' in training.models; add "
                "them, or omit it"
            )
        for where, names in (("scoring.kinds", self.scoring.kinds), ("training.models", self.training.models)):
            if len(set(names)) < len(names):
                yield f"{where}={list(names)}: has duplicates; list each name once"
        if self.samples % self.group:
            counted = "count" if isinstance(self.response_tokens, Drawn) else "length"
            yield (
                f"response_tokens has {counted} {self.samples}, not a multiple of group={self.group}; every prompt "
                "needs the same number of samples"
            )
        for name in ("slot_speed", "decode_speed"):
            if (given := getattr(self, name)) and len(given) != self.slots:
                yield f"{name} has {len(given)} values for slots={self.slots}; give one per slot, or none"
        for i, failure in enumerate(self.failures):
            if failure.slot >= self.slots:
                yield f"failures[{i}].slot={failure.slot}: must be below slots={self.slots}"
        for i, slowdown in enumerate(self.slowdowns):
            if slowdown.slot >= self.slots:
                yield f"slowdowns[{i}].slot={slowdown.slot}: must be below slots={self.slots}"
            if slowdown.until_s is not None and slowdown.until_s <= slowdown.from_s:
                yield f"slowdowns[{i}].until_s={slowdown.until_s:g}: must be after from_s={slowdown.from_s:g}"
        if self.baselines and self.group == 1:
            yield "baselines=true: requires group of 2 or more, a baseline and at least one sample to train on"
        longest = self.prompt_tokens + (self.longest if self.samples and not self.samples % self.group else 0)
        if longest > self.engine.kv_tokens:
            yield (
                f"engine.kv_tokens={self.engine.kv_tokens}: the longest sample has {longest} tokens with its prompt; "
                "raise kv_tokens, or lower response_tokens (cap)"
            )

    @property
    def samples(self) -> int:
        drawn = self.response_tokens
        return drawn.count if isinstance(drawn, Drawn) else len(drawn)

    @property
    def longest(self) -> int:
        return int(self.lengths().max())

    @property
    def max_response_tokens(self) -> int:
        """Return the maximum length of a response: the cap, or else the longest length."""
        drawn = self.response_tokens
        return (drawn.cap if isinstance(drawn, Drawn) else None) or self.longest

    @property
    def prompts(self) -> int:
        return self.samples // self.group

    @property
    def mini_batch_prompts(self) -> int:
        """Return the prompts per mini-batch; the last one may have fewer."""
        return -(-self.prompts // self.training.mini_batches)

    @property
    def trained(self) -> np.ndarray:
        """Return bool [samples]: True for samples that are trained on, all but baselines."""
        return (not self.baselines) | (np.arange(self.samples) % self.group < self.group - 1)

    def passes(self, kind: str) -> np.ndarray:
        """Return bool [samples]: True for samples that need this kind of scoring."""
        first = np.arange(self.samples) < self.mini_batch_prompts * self.group
        return self.trained & ~(first & (self.scoring.by_update and kind == "old_log_prob"))

    def speeds(self) -> tuple[Speed, ...]:
        of_slot = defaultdict[int, list[Slowdown]](list)
        for slowdown in self.slowdowns:
            of_slot[slowdown.slot].append(slowdown)
        given = self.slot_speed or (1.0,) * self.slots
        return tuple(_speed(speed, of_slot.get(slot, ())) for slot, speed in enumerate(given))

    def lengths(self) -> np.ndarray:
        drawn = self.response_tokens
        return drawn.draw(self.group, self.seed) if isinstance(drawn, Drawn) else np.array(drawn, np.int64)

    def history(self) -> np.ndarray | None:
        """Return float64 [prompts]: predicted mean lengths; None without predictions."""
        if self.length_history_sigma is None:
            return None
        rng = np.random.default_rng((self.seed, 1))  # independent of the draw of lengths
        means = self.lengths().reshape(self.prompts, self.group).mean(axis=1)
        return means * np.exp(rng.normal(0.0, self.length_history_sigma, self.prompts))

    def settings(self, given: Settings) -> Settings:
        if self.credit_samples is not None:
            given = replace(given, credit_samples=self.credit_samples)
        return replace(
            given,
            lockstep=self.lockstep == "all",
            lockstep_backward=self.lockstep != "none",
            pipelined=self.training.bubbles is not None,
        )

    def costs(self) -> Costs:
        parts = ((self.engine, ENGINE), (self.scoring, SCORING), (self.training, TRAINING), (self, MACHINE))
        terms = {term: getattr(part, name) for part, names in parts for name, term in names.items()}
        return Costs(max_tokens=self.max_response_tokens, **terms)


ENGINE = {entry.name: entry.name for entry in fields(Engine)}
SCORING = {"tokens_per_s": "score_tokens_per_s", "call_s": "score_call_s"}
TRAINING = {"tokens_per_s": "train_tokens_per_s", "call_s": "train_call_s", "optimizer_s": "optimizer_s"}
MACHINE = {name: name for name in ("switch_s", "move_s", "step_s", "kv_bytes_per_token", "link_bytes_per_s")}
"""Fields of a workload and its parts -> terms of `Costs`."""


def _speed(speed: float, slowdowns: Iterable[Slowdown]) -> Speed:
    jumps = [(each.from_s, 1 / each.rate) for each in slowdowns]
    jumps += [(each.until_s, each.rate) for each in slowdowns if each.until_s is not None]
    changes = {0.0: speed}
    for time, factor in sorted(jumps):
        speed *= factor
        changes[time] = speed
    return Speed(list(changes.items()))


def workload_from_costs(costs: Costs, slots: int, response_tokens: tuple[int, ...], **more: Any) -> Workload:
    """Return a workload on a machine with these costs and `more` fields. Raises WorkloadError."""

    def given(names: Mapping[str, str]) -> dict[str, Any]:
        return {name: getattr(costs, term) for name, term in names.items()}

    more["engine"] = Engine(**given(ENGINE))
    more["scoring"] = replace(more.get("scoring", Scoring()), **given(SCORING))
    more["training"] = replace(more.get("training", Training()), **given(TRAINING))
    return Workload(slots, response_tokens, **given(MACHINE), **more)


EXAMPLE = {
    "slots": 16,
    "response_tokens": {"lognormal": {"median": 200, "sigma": 1.0}, "cap": 512, "count": 256},
    "group": 8,
    "prompt_tokens": 200,
    "engine": {"step_base_s": 0.02, "flat_batch": 64, "max_sequences": 256, "kv_tokens": 400000},
    "scoring": {"tokens_per_s": 40000, "kinds": ["old_log_prob", "ref"]},
    "training": {"tokens_per_s": 8000, "mini_batches": 4},
    "switch_s": 0.5,
    "length_history_sigma": 0.3,
}
"""Workload that `rlfuse simulate --example` writes: sixteen slots, a long tail, groups of eight."""


def parse(data: Any) -> Workload:
    """Return a workload from decoded JSON. Raises WorkloadError."""
    return read(Workload, data, WorkloadError)


def read_workload(path: Path) -> Workload:
    """Return a workload from a JSON file. Raises WorkloadError, naming the file."""
    return read_json(path, parse, "workload", WorkloadError)
