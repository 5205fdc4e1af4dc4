"""Tune the settings of policies by simulating resampled response lengths, as RLHFuse does (arXiv 2409.13221)."""

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
"""Candidates (share of samples below which the tail is consolidated, 0: never; maximum slowdown of decoding)."""
SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)  # candidates: of the samples that fit a slot, and of prefill-only engines
BASELINE_SETTINGS = Settings(threshold=0.0, longest_first=False)  # like `stream`, but with early training
MAX_SLOTS, MAX_SAMPLES = 16, 2048  # limits of the scaled-down workload; half the slots for more samples
RISK = 0.1  # required gain per unit of decode slowdown, since future lengths differ
SMALLER_BATCH_PENALTY = 0.005  # required gain for smaller batches per slot
EQUAL_TOLERANCE = 1e-6  # relative difference of steps that count as equal
MAX_LOSS = 0.02  # tolerated relative loss on one draw if the total gains
MAX_LOSS_OVER_GAIN = 0.25
"""Maximum further losses relative to the gains of other draws. With 0.5, settings that lost 4 to 6 % on three draws
were accepted."""
DRAWS = 2
MAX_SAMPLES_OF_TWO_DRAWS = 64  # scaled-down samples up to which DRAWS are simulated instead of one
MAX_VERIFICATION_DRAWS, MAX_VERIFICATION_SAMPLES = (
    8,
    1024,
)  # limits of additional draws for verification, and of their total samples


def tune(workload: Workload, policy: str, given: Settings | None = None) -> Settings:
    """Return the settings with the shortest mean step on other draws of this workload's lengths; the first of equals.

    Settings are rejected if single draws lose too much against `serial`, or if the total loses. Fallbacks are, in
    order: no early training, no consolidation, no admission by length, no overlap. `given`: settings from the
    configuration, which are kept.
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
        """Return the risk-adjusted mean step; inf if some draws lose too much against `serial`."""
        changes = [(taken(settings, draw) - serial(draw), draw) for draw in draws]
        lost = sum(max(0.0, change - MAX_LOSS * serial(draw) - draw.switch_s) for change, draw in changes)
        if lost > MAX_LOSS_OVER_GAIN * sum(max(0.0, -change) for change, _ in changes):
            return inf
        return risk_adjusted(fmean(taken(settings, draw) for draw in draws), settings)

    def verified_seconds(settings: Settings) -> float:
        """Return the same, verified on more draws; inf if their total loses against `serial`."""
        found, every = seconds(settings, draws + proofs), draws + proofs
        lost = found < inf and sum(taken(settings, draw) - serial(draw) * (1 + EQUAL_TOLERANCE) for draw in every) > 0
        return inf if lost else found

    def with_best_early_training(settings: Settings) -> Settings:
        """Return the settings, without early training if that is faster."""
        tried = (True, False) if "early_training" in tuned else (True,)
        return min((replace(settings, early_training=early) for early in tried), key=verified_seconds)

    baseline = replace(given, **{name: getattr(BASELINE_SETTINGS, name) for name in TUNABLE})
    lengths_known = "longest_first" in tuned and workload.length_history_sigma is not None
    first = min((replace(baseline, longest_first=True), baseline), key=seconds) if lengths_known else baseline
    best = fastest_settings(consolidation_candidates(first, tuned), seconds, bound)
    if lengths_known and "max_sequences" in tuned:  # with smaller batches the tail may need no consolidation
        best = min((best, *smaller_batch_candidates((best, first), workload)), key=verified_seconds)
    others = [replace(best, longest_first=not best.longest_first)] * lengths_known
    best = min(map(with_best_early_training, (best, *others)), key=verified_seconds)
    for each in (best, with_best_early_training(first), with_best_early_training(baseline)):
        if verified_seconds(each) < inf:
            return each
    return replace(baseline, overlapping=False) if "overlapping" in tuned else baseline


def fastest_settings(candidates: Iterable[Settings], seconds: Callable[[Settings], float], bound: float) -> Settings:
    """Return the fastest candidate, the first of equals. Candidates are skipped if their lower bound is not faster."""
    best, *others = candidates
    for each in others:
        if risk_adjusted(bound, each) < seconds(best) and seconds(each) < seconds(best):
            best = each
    return best


def risk_adjusted(step_s: float, settings: Settings) -> float:
    """Return the step time with the penalties for risky settings."""
    held_back = SMALLER_BATCH_PENALTY * (settings.max_sequences < Settings().max_sequences)
    return round(step_s * (1 + RISK * (settings.max_decode_slowdown - 1) + held_back), 6)


def consolidation_candidates(first: Settings, tuned: Collection[str]) -> list[Settings]:
    """Return `first` with each candidate for consolidating the tail."""
    tried = [replace(first, threshold=below, max_decode_slowdown=by) for below, by in CONSOLIDATIONS]
    if "cost_gated" in tuned:
        tried += [replace(each, cost_gated=False) for each in tried if each.threshold]
    return tried


def smaller_batch_candidates(found: Iterable[Settings], workload: Workload) -> list[Settings]:
    """Return the settings with smaller batches per slot, longest samples first."""
    slots, samples = _scaled(workload)
    held = min(workload.engine.max_sequences, samples // slots)
    limits = [max(1, round(share * held)) for share in SHARES]
    return [replace(each, longest_first=True, max_sequences=most) for each, most in product(found, limits)]


def tuning_draws(workload: Workload) -> list[Workload]:
    """Return scaled-down workloads with resampled lengths, to tune on."""
    count = DRAWS if _scaled(workload)[1] <= MAX_SAMPLES_OF_TWO_DRAWS else 1
    return _drawn(workload, range(1, 1 + count))


def verification_draws(workload: Workload) -> list[Workload]:
    """Return further draws, to verify tuned settings on."""
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
    """Return about `samples` lengths, drawn with replacement in whole groups."""
    groups = np.array(lengths[: len(lengths) // group * group]).reshape(-1, group)
    count = max(1, round(samples / group))
    return tuple(groups[np.random.default_rng(seed).integers(len(groups), size=count)].ravel().tolist())


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Share of prefill-only engines (0: none), and the reason."""

    share: float
    why: str


def choose_prefill_share(workload: Workload, policy: str, settings: Settings, mode: str, error: float) -> PrefillChoice:
    """Choose the share of prefill-only engines. `mode`: rollout.disaggregate; `error`: relative error of the costs."""
    undivided = replace(settings, prefill_share=0.0)
    if mode == "off":
        return PrefillChoice(0.0, "all engines prefill and decode")
    if workload.slots < 2:
        return PrefillChoice(0.0, "no disaggregation: there is only one engine")
    if workload.link_bytes_per_s <= 0:
        unknown = "KV caches cannot be copied between engines, or the bandwidth is unknown"
        return PrefillChoice(0.0, f"no disaggregation: {unknown}")
    draws = tuning_draws(workload)
    undivided_s = fmean(_seconds(draw, policy, undivided) for draw in draws)
    reading = workload.prompts * workload.prompt_tokens / workload.costs().prefill_tokens_per_s / workload.slots
    if mode == "auto" and reading <= error * undivided_s:
        reason = f"prefill is {reading / undivided_s:.1%} of a step of {undivided_s:.3g} s"
        return PrefillChoice(0.0, f"no disaggregation: {reason}, within the error of the costs ({error:.0%})")
    steps = {share: fmean(_seconds(d, policy, replace(undivided, prefill_share=share)) for d in draws)
             for share in _shares(draws[0].slots)}  # fmt: skip
    share = min(steps, key=steps.__getitem__)
    count, ratio = prefill_engine_count(share, workload.slots), steps[share] / undivided_s
    reason = f"with {count} of {workload.slots} engines for prefill, the simulated step takes {ratio:.3f}x the time"
    if mode == "on" or ratio < 1 - error:
        return PrefillChoice(share, f"disaggregated: {reason}")
    return PrefillChoice(0.0, f"no disaggregation: {reason}; the costs have an error of {error:.0%}")


def cost_error(fitted: Fit) -> float:
    """Return the relative error of fitted costs: the largest of all kinds of work; 1 if none was measured."""
    kinds = ("decoding", "scoring", "training")
    return max((fitted.accuracy[kind].typical for kind in kinds if kind in fitted.accuracy), default=1.0)


def _shares(engines: int) -> Sequence[float]:
    return list({prefill_engine_count(share, engines): share for share in SHARES}.values())


def _seconds(workload: Workload, policy: str, settings: Settings) -> float:
    """Return the step time plus the copies of KV caches, which stall the smaller group of engines."""
    result = simulate_later_step(workload, policy, settings).result
    if not settings.prefill_share:
        return result.step_s
    readers = prefill_engine_count(settings.prefill_share, workload.slots)
    copied = result.moved_bytes / workload.link_bytes_per_s / min(readers, workload.slots - readers)
    return result.step_s + copied
