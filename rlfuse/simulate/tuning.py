"""Tune settings of policies by simulating other draws of the recorded lengths, as RLHFuse does (arXiv 2409.13221)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from statistics import fmean

import numpy as np

from rlfuse.costs.fit import Fit
from rlfuse.fusion.custom_policies import loaded_policy
from rlfuse.fusion.decisions import TUNABLE, Settings, traits_of
from rlfuse.fusion.disaggregation import prefill_engine_count
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.runner import simulate_later_step
from rlfuse.simulate.speed import evenly_spaced
from rlfuse.simulate.workload import Workload

CONSOLIDATIONS = [(0.0, 1.0), *product((0.1, 0.2, 0.35, 0.6), (1.0, 1.25, 1.6, 2.0))]
"""(Below which share of the samples, 0: never, the tail is consolidated; how much slower decoding may get by it)."""
SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)  # of the samples that a slot could hold, and of engines that only prefill
BASELINE_SETTINGS = Settings(
    threshold=0.0, longest_first=False
)  # of what is tuned: as `stream`, but that it trains early
MAX_SLOTS, MAX_SAMPLES = 16, 2048  # of the scaled-down machine; half the slots for more samples
RISK = 0.1  # gain required per part by which decoding may get slower: lengths to come differ
SMALLER_BATCH_PENALTY = 0.005  # gain required for giving slots fewer samples at once
EQUAL_TOLERANCE = 1e-6  # part of a step by which two that are the same may differ
MAX_LOSS = 0.02  # part of a step that one draw may lose if all together gain
MAX_LOSS_OVER_GAIN = 0.25
"""What draws may lose beyond that, over what the others gain. With 0.5, settings were accepted that lost 4 to 6 % on
three draws."""
DRAWS = 2
MAX_SAMPLES_OF_TWO_DRAWS = 64  # samples of a scaled-down step up to which it is worth simulating more than one draw
MAX_VERIFICATION_DRAWS, MAX_VERIFICATION_SAMPLES = 8, 1024  # more draws to verify on, and their samples in all


def tune(workload: Workload, policy: str, given: Settings | None = None) -> Settings:
    """Return the settings with the shortest mean step on other draws of this workload's lengths; the first of equals.

    Settings are rejected with which draws lose too much against `serial`, or all of them together lose. Then early
    training is given up first, then consolidation, admission by length, and finally all overlap. `given`: settings from
    the configuration, which are kept.
    """
    given, function = given or Settings(), loaded_policy(policy)
    if not (tuned := traits_of(function).tuned):
        return given
    draws, proofs = tuple(tuning_draws(workload)), tuple(verification_draws(workload))
    bound = fmean(lower_bound(draw).seconds for draw in draws) * (1 - EQUAL_TOLERANCE)
    serial = cache(lambda draw: simulate_later_step(draw, "serial", given).result.step_s)
    taken = cache(lambda settings, draw: simulate_later_step(draw, function, settings).result.step_s)

    @cache
    def seconds(settings: Settings, draws: tuple[Workload, ...] = draws) -> float:
        """Infinite where some draws lose much against `serial`, for what others gain."""
        changes = [(taken(settings, draw) - serial(draw), draw) for draw in draws]
        lost = sum(max(0.0, change - MAX_LOSS * serial(draw) - draw.switch_s) for change, draw in changes)
        if lost > MAX_LOSS_OVER_GAIN * sum(max(0.0, -change) for change, _ in changes):
            return inf
        return risk_adjusted(fmean(taken(settings, draw) for draw in draws), settings)

    def surely(settings: Settings) -> float:
        """The same on more draws; inf, too, where all of them together lose."""
        found, every = seconds(settings, draws + proofs), draws + proofs
        lost = found < inf and sum(taken(settings, draw) - serial(draw) * (1 + EQUAL_TOLERANCE) for draw in every) > 0
        return inf if lost else found

    def surer(settings: Settings) -> Settings:
        """The same, but where that is better training waits until all is scored."""
        tried = (True, False) if "early_training" in tuned else (True,)
        return min((replace(settings, early_training=early) for early in tried), key=surely)

    surest = replace(given, **{name: getattr(BASELINE_SETTINGS, name) for name in TUNABLE})
    known = "longest_first" in tuned and workload.length_history_sigma is not None
    first = min((replace(surest, longest_first=True), surest), key=seconds) if known else surest
    best = fastest_settings(consolidation_candidates(first, tuned), seconds, bound)
    if known and "max_sequences" in tuned:  # with small batches the tail may need no moves
        best = min((best, *smaller_batch_candidates((best, first), workload)), key=surely)
    others = [replace(best, longest_first=not best.longest_first)] * known
    best = min(map(surer, (best, *others)), key=surely)
    for each in (best, surer(first), surer(surest)):
        if surely(each) < inf:
            return each
    return replace(surest, overlapping=False) if "overlapping" in tuned else surest


def fastest_settings(candidates: Iterable[Settings], seconds: Callable[[Settings], float], bound: float) -> Settings:
    """The first of equals. Which is slower than the best before it even in the least time is not simulated."""
    best, *others = candidates
    for each in others:
        if risk_adjusted(bound, each) < seconds(best) and seconds(each) < seconds(best):
            best = each
    return best


def risk_adjusted(step_s: float, settings: Settings) -> float:
    """With what a gain on a few draws has to be at least, for the risk to be taken."""
    held_back = SMALLER_BATCH_PENALTY * (settings.max_sequences < Settings().max_sequences)
    return round(step_s * (1 + RISK * (settings.max_decode_slowdown - 1) + held_back), 6)


def consolidation_candidates(first: Settings, tuned: Collection[str]) -> list[Settings]:
    """`first` with each way of moving the tail."""
    tried = [replace(first, threshold=below, max_decode_slowdown=by) for below, by in CONSOLIDATIONS]
    if "cost_gated" in tuned:
        tried += [replace(each, cost_gated=False) for each in tried if each.threshold]
    return tried


def smaller_batch_candidates(found: Iterable[Settings], workload: Workload) -> list[Settings]:
    """Each with fewer samples on a slot at once than it could hold, the longest first."""
    slots, samples = _scaled(workload)
    held = min(workload.engine.max_sequences, samples // slots)
    limits = [max(1, round(share * held)) for share in SHARES]
    return [replace(each, longest_first=True, max_sequences=most) for each, most in product(found, limits)]


def tuning_draws(workload: Workload) -> list[Workload]:
    """Steps like this one, scaled down."""
    count = DRAWS if _scaled(workload)[1] <= MAX_SAMPLES_OF_TWO_DRAWS else 1
    return _drawn(workload, range(1, 1 + count))


def verification_draws(workload: Workload) -> list[Workload]:
    """More of them."""
    count = min(MAX_VERIFICATION_DRAWS, MAX_VERIFICATION_SAMPLES // _scaled(workload)[1])
    return _drawn(workload, range(1 + DRAWS, 1 + DRAWS + count))


def _drawn(workload: Workload, seeds: Iterable[int]) -> list[Workload]:
    slots, samples = _scaled(workload)
    speeds, decoding = evenly_spaced(workload.slot_speed, slots), evenly_spaced(workload.decode_speed, slots)
    small = replace(workload, slots=slots, slot_speed=speeds, decode_speed=decoding, slowdowns=(), failures=())
    lengths = workload.lengths().tolist()
    return [replace(small, response_tokens=resample(lengths, workload.group, samples, seed)) for seed in seeds]


def _scaled(workload: Workload) -> tuple[int, int]:
    per_slot = workload.samples / workload.slots
    slots = min(workload.slots, MAX_SLOTS if per_slot * MAX_SLOTS <= MAX_SAMPLES else MAX_SLOTS // 2)
    return slots, max(1, round(per_slot * slots))


def resample(lengths: Sequence[int], group: int, samples: int, seed: int) -> tuple[int, ...]:
    """About so many lengths, drawn with replacement in whole groups."""
    groups = np.array(lengths[: len(lengths) // group * group]).reshape(-1, group)
    count = max(1, round(samples / group))
    return tuple(groups[np.random.default_rng(seed).integers(len(groups), size=count)].ravel().tolist())


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """The share of the engines that reads prompts, 0 where all do, and why."""

    share: float
    why: str


def choose_prefill_share(workload: Workload, policy: str, settings: Settings, mode: str, error: float) -> PrefillChoice:
    """`mode`: rollout.disaggregate; `error`: part of a step that the costs may be wrong by."""
    whole = replace(settings, prefill_share=0.0)
    if mode == "off":
        return PrefillChoice(0.0, "all engines read prompts and decode")
    if workload.slots < 2:
        return PrefillChoice(0.0, "prefill and decoding stay together: there is one engine")
    if workload.link_bytes_per_s <= 0:
        unknown = "KV caches don't travel between engines, or nobody knows how fast"
        return PrefillChoice(0.0, f"prefill and decoding stay together: {unknown}")
    draws = tuning_draws(workload)
    together = fmean(_seconds(draw, policy, whole) for draw in draws)
    reading = workload.prompts * workload.prompt_tokens / workload.costs().prefill_tokens_per_s / workload.slots
    if mode == "auto" and reading <= error * together:
        told = f"reading prompts is {reading / together:.1%} of a step of {together:.3g} s"
        return PrefillChoice(0.0, f"prefill and decoding stay together: {told}, the costs may be wrong by {error:.0%}")
    steps = {share: fmean(_seconds(d, policy, replace(whole, prefill_share=share)) for d in draws)
             for share in _shares(draws[0].slots)}  # fmt: skip
    share = min(steps, key=steps.__getitem__)
    count, ratio = prefill_engine_count(share, workload.slots), steps[share] / together
    told = f"with {count} of {workload.slots} engines for prompts the simulated step takes {ratio:.3f} times as long"
    if mode == "on" or ratio < 1 - error:
        return PrefillChoice(share, f"prefill and decoding are apart: {told}")
    return PrefillChoice(0.0, f"prefill and decoding stay together: {told}, the costs may be wrong by {error:.0%}")


def cost_error(fitted: Fit) -> float:
    """Part of a step that costs may be wrong by: that of the kind of work which they tell worst; all, if untold."""
    kinds = ("decoding", "scoring", "training")
    return max((fitted.accuracy[kind].typical for kind in kinds if kind in fitted.accuracy), default=1.0)


def _shares(engines: int) -> Sequence[float]:
    return list({prefill_engine_count(share, engines): share for share in SHARES}.values())


def _seconds(workload: Workload, policy: str, settings: Settings) -> float:
    """Of a step, with the copies that stall the engines that make or take them, whichever are fewer."""
    result = simulate_later_step(workload, policy, settings).result
    if not settings.prefill_share:
        return result.step_s
    readers = prefill_engine_count(settings.prefill_share, workload.slots)
    copied = result.moved_bytes / workload.link_bytes_per_s / min(readers, workload.slots - readers)
    return result.step_s + copied
