"""Lower bound on the time of any on-policy schedule of a workload on the simulated machine, with its cause.

Assumptions: the schedule is on-policy; a slot has one role at a time, and starts and ends as an engine; optimizer steps
need all slots as trainers, hence follow all generation; mini-batches are fixed by prompt order, and each needs the
weights of the previous one; a sample is trained on after all of its scoring. Costs are those of `costs.model`.

Proof. C(t), the integral of the slots' speeds, is the cost that can be done by time t: work w started at s ends at
D(s, w) = C^-1(C(s) + w) or later. v: maximum speed of a slot, u: sum of the minimum speeds of all slots, V: maximum of
the summed speeds. G: time at which the last sample finishes; x_b: a step of b sequences without context; sample i has
L_i response tokens, prefill p_i and context cost c_i. The last step ends at T; `switch_s` and `step_s` follow.

1. One sample: G >= e_i = (p_i + L_i * x_1 + c_i) / v.
2. All generation: charge each sequence x_b / b and its context. With f, the largest convex non-increasing function
   below (x_b, x_b / b), and X_i = (v * G - p_i - c_i) / L_i, by Jensen the cost is at least W(G) = sum over prompts of
   p + sum over samples of (L_i * f(X_i) + c_i). A cache of K tokens: the first part of the sum is at least x / K * all
   contexts.
3. The first optimizer step follows generation, a switch of every slot, all scoring required before it, and the first
   mini-batch: S = max(G + switch_s, D(0, W(G) + all scoring + its training + u * switch_s)).
4. The other mini-batches follow, each taking at least its work / V and its longest sample at v, and all optimizer
   steps; and T >= D(G + switch_s, the work of all other mini-batches + u * all optimizer steps).
5. All work: T >= D(0, W(G) + all scoring + all training + u * (switch_s + all optimizer steps)).
6. One sample again: T >= e_i + a pass over it + its training (of a baseline: a call that trains on the samples that
   it belongs to) + the mini-batches after its own (or, where all scoring
   precedes the first step, + all other mini-batches + all optimizer steps).
7. Samples that end together: for every t, the work of 3 that belongs to samples with e_i >= t begins at t or later.
8. Lockstep (training; with `all` also scoring): none of it runs during the H seconds of generation, nor during a switch
   and c seconds of call and optimizer costs; h = H + switch_s + c. T >= D(0, w + u * h), and T >= h + the work of each
   mini-batch / V or its longest sample at v. Slots with pipeline stages do an even share each, plus bubbles less
   passes.

The bound is the least over G >= max e_i of the largest of these. `decode_speed` divides x_b and c_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlfuse.fusion.decisions import PASS_BEFORE_STEP
from rlfuse.simulate.speed import Speed, combined_speed
from rlfuse.simulate.workload import Workload

BOUND_TOLERANCE = 1e-8  # relative tolerance of the bisection


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that no on-policy schedule can beat."""

    seconds: float  # the whole step
    bound_by: str
    """`longest sample` if generation cannot be shorter. Otherwise the dominant work: `generation work`, `scoring` or
    `training` if it is more than half of all work, else `work`."""
    generation_s: float
    generation_and_scoring_s: float


def lower_bound(workload: Workload) -> Bound:
    """Return the lower bound that the module docstring proves. Takes milliseconds for thousands of samples."""
    generation, rest = _Generation(workload), _Rest(workload)
    speeds, earliest = workload.speeds(), float(generation.ends.max())
    least, switch_s, after_s = sum(speed.least for speed in speeds), workload.switch_s, rest.after_first_s
    total, switch, steps = combined_speed(speeds), least * workload.switch_s, least * rest.optimizer_s

    def rising(end: float) -> float:
        whole = total.end(end + switch_s, rest.later_work + steps)
        return max(end + switch_s + rest.optimizer_s + after_s, whole)

    def falling(end: float) -> float:
        cost = generation.work(end) + switch
        first = total.end(0.0, cost + rest.first_work) + rest.optimizer_s + after_s
        return max(first, total.end(0.0, cost + rest.work + steps))

    end = _crossing(earliest, rising, falling)
    together_s = _following(generation.ends, rest.before_first, total) + rest.optimizer_s + after_s
    seconds, chain = rising(end), max(together_s, float((generation.ends + rest.chains).max()))
    if workload.lockstep != "none":
        alone = _crossing(earliest, lambda end: end, lambda end: generation.work(end) / total.most)
        work, calls_s = rest.in_lockstep
        idle_s = alone + switch_s + calls_s
        if workload.training.bubbles is None:
            ends = [idle_s + rest.shared_s, total.end(0.0, rest.shared_work + least * idle_s)]
        else:
            ends = [max(idle_s + work / each.most, each.end(0.0, work + each.least * idle_s)) for each in speeds]
        if max(ends) > seconds:
            seconds, end = max(ends), alone
    generated = _crossing(earliest, lambda end: end, lambda end: total.end(0.0, generation.work(end)))
    turned = rest.scoring_work + bool(workload.scoring.kinds) * switch_s * min(speed.least for speed in speeds)
    passed = float(rest.passes.min())
    scored = _crossing(earliest, lambda end: end + passed, lambda end: total.end(0.0, generation.work(end) + turned))
    return Bound(
        max(seconds, chain) + switch_s + workload.step_s,
        "longest sample" if chain > seconds else _binding(earliest, end, generation.work(end), rest),
        generated,
        max(scored + passed, float((generation.ends + rest.passes).max())),
    )


def _following(ends: np.ndarray, work: np.ndarray, total: Speed) -> float:
    """Point 7: return the earliest end of all work if that of a sample starts no earlier than its generation ends."""
    order = np.argsort(-ends)
    following = np.cumsum(work[order])
    last = np.flatnonzero(np.append(np.diff(ends[order]) < 0, True))  # last of equal ends
    return max(map(total.end, ends[order][last].tolist(), following[last].tolist()))


def _crossing(earliest: float, rising: Callable[[float], float], falling: Callable[[float], float]) -> float:
    """Return the G >= earliest that minimizes the maximum of both functions, rounded down."""
    low, high = earliest, max(earliest, falling(earliest))  # `rising` is at least G
    if falling(low) <= rising(low):
        return low
    while high - low > BOUND_TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > rising(middle) else (low, middle)
    return low


def _binding(earliest: float, end: float, generation_work: float, rest: _Rest) -> str:
    if end <= earliest:
        return "longest sample" if earliest >= rest.after_first_s else "training"
    parts = {"generation work": generation_work, "scoring": rest.scoring_work, "training": rest.training_work}
    name = max(parts, key=parts.__getitem__)
    return name if 2 * parts[name] > sum(parts.values()) else "work"


class _Generation:
    """Points 1 and 2 of the proof. Costs in seconds at speed 1; samples of equal length are grouped."""

    def __init__(self, workload: Workload):
        costs, faster = workload.costs(), max(workload.decode_speed, default=1.0)
        self.lengths, self.counts = np.unique(workload.lengths().astype(np.float64), return_counts=True)
        self.fastest = max(speed.most for speed in workload.speeds())
        self.prefill = workload.prompt_tokens / costs.prefill_tokens_per_s
        self.prompts = workload.prompts
        seen = self.lengths * workload.prompt_tokens + self.lengths * (self.lengths - 1) / 2
        self.context = costs.step_per_context_token_s * seen / faster
        batches = np.arange(1, min(costs.max_sequences, workload.samples) + 1)
        steps = costs.step_base_s + costs.step_per_sequence_s * np.maximum(0, batches - costs.flat_batch)
        steps /= faster
        ends = (self.prefill + self.lengths * steps.min() + self.context) / self.fastest
        self.ends = ends[np.searchsorted(self.lengths, workload.lengths())]
        self.hull = _falling_hull(steps, steps / batches)
        self.in_cache = float(self.counts @ seen * steps.min()) / costs.kv_tokens

    def work(self, end: float) -> float:
        """Return W(G): the minimum cost of all generation if it ends at G = `end` seconds."""
        mean_step = (self.fastest * end - self.prefill - self.context) / self.lengths
        charges = float(self.counts @ (self.lengths * np.interp(mean_step, *self.hull)))
        return self.prompts * self.prefill + max(charges, self.in_cache) + float(self.counts @ self.context)


def _falling_hull(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices of the largest convex non-increasing function below the points."""
    hull: list[tuple[float, float]] = []
    for point in sorted(zip(x.tolist(), y.tolist(), strict=True)):
        if hull and point[1] >= hull[-1][1]:
            continue
        while hull and (hull[-1][0] == point[0] or (len(hull) > 1 and _above(hull[-2], hull[-1], point))):
            hull.pop()
        hull.append(point)
    return np.array([corner[0] for corner in hull]), np.array([corner[1] for corner in hull])


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


class _Rest:
    """Work after generation: points 3 to 8 of the proof."""

    def __init__(self, workload: Workload):
        scoring, training, speeds = workload.scoring, workload.training, workload.speeds()
        costs = workload.costs()
        fastest, power = max(speed.most for speed in speeds), combined_speed(speeds).most
        tokens = workload.trained * (workload.lengths() + float(workload.prompt_tokens))
        part = np.arange(workload.samples) // (workload.mini_batch_prompts * workload.group)
        one_pass, one_training = tokens / costs.score_tokens_per_s, tokens / costs.train_tokens_per_s
        models, steps = len(training.models), training.epochs * (int(part[-1]) + 1)
        kinds = sum((workload.passes(kind).astype(int) for kind in scoring.kinds), np.zeros(workload.samples, int))
        self.scoring_work = float((kinds * one_pass).sum())
        self.training_work = models * training.epochs * float(one_training.sum())
        self.work = self.scoring_work + self.training_work
        self.optimizer_s = models * steps * training.optimizer_s
        call_s = 0.0 if scoring.deferred else scoring.call_s  # passes in bubbles are no separate calls
        self.passes = np.minimum(1, kinds) * (one_pass / fastest + call_s)
        needed = kinds if models == 1 else np.minimum(1, kinds)  # each model needs at least one kind
        all_scored_first = all(PASS_BEFORE_STEP[model] in scoring.kinds for model in training.models)
        self.before_first = np.where(part == 0, needed * one_pass + one_training, all_scored_first * one_pass)
        self.first_work = float(self.before_first.sum())

        sums, longest = np.bincount(part, one_training), np.zeros(int(part[-1]) + 1)
        np.maximum.at(longest, part, one_training)
        each = np.maximum(sums / power, longest / fastest + training.call_s)  # of one model
        later = training.epochs * each.sum() - each[0]
        self.later_work = models * float(training.epochs * sums.sum() - sums[0])
        self.after_first_s = max(float(later), self.later_work / power)
        own = one_training / fastest + training.call_s
        left = training.epochs * each.sum() - np.cumsum(each)
        collective = training.optimizer_s * (steps - np.arange(len(each)))
        self.chains = self.passes + own + (left + collective)[part]
        if all_scored_first:
            self.chains = np.maximum(self.chains, self.passes + self.optimizer_s + self.after_first_s)
        passes = self.scoring_work * (workload.lockstep == "all")
        self.shared_work = models * training.epochs * float(sums.sum()) + passes
        shortest = np.maximum(sums / power, longest / fastest)
        self.shared_s = models * training.epochs * float(shortest.sum()) + passes / power
        even = np.maximum(sums / workload.slots, longest)  # work shared by all stages; samples are not split
        self.in_lockstep = self._in_lockstep(workload, float(even.sum()), len(each))

    def _in_lockstep(self, workload: Workload, even: float, parts: int) -> tuple[float, float]:
        """Point 8: return the seconds of work of each slot after generation, and the seconds in which none works.
        `even`: training of one model on each slot."""
        scoring, training, models = workload.scoring, workload.training, len(workload.training.models)
        all_in_lockstep, bubbles = workload.lockstep == "all", training.bubbles
        passes = self.scoring_work / workload.slots if all_in_lockstep else 0.0
        scoring_calls = sum(bool(workload.passes(kind).any()) for kind in scoring.kinds)
        scoring_calls *= all_in_lockstep and not scoring.deferred  # otherwise they are not calls of all slots
        trained = models * training.epochs * even
        idle = trained * (bubbles or 0.0)
        exposed_s = max(idle, passes) if scoring.deferred else idle + passes
        calls = training.epochs * parts * (models if bubbles is None else 1)
        return trained + exposed_s, scoring_calls * scoring.call_s + calls * training.call_s + self.optimizer_s
