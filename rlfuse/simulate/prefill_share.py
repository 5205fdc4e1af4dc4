"""Decide by simulation whether prefill and decoding get engines of their own (`rollout.disaggregate`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.disaggregation import count_of
from rlfuse.simulate.fitting import Fit
from rlfuse.simulate.runner import later_step
from rlfuse.simulate.tuning import draws_of
from rlfuse.simulate.workload import Workload

SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)  # shares of the engines that may read prompts


@dataclass(frozen=True, slots=True)
class Found:
    """The share of the engines that reads prompts, 0 where all do, and why."""

    share: float
    why: str


def find(workload: Workload, policy: str, settings: Settings, mode: str, error: float) -> Found:
    """`mode`: rollout.disaggregate; `error`: part of a step that the costs may be wrong by."""
    whole = replace(settings, prefill_share=0.0)
    if mode == "off":
        return Found(0.0, "all engines read prompts and decode")
    if workload.slots < 2:
        return Found(0.0, "prefill and decoding stay together: there is one engine")
    if workload.link_bytes_per_s <= 0:
        unknown = "KV caches don't travel between engines, or nobody knows how fast"
        return Found(0.0, f"prefill and decoding stay together: {unknown}")
    draws = draws_of(workload)
    together = fmean(_seconds(draw, policy, whole) for draw in draws)
    reading = workload.prompts * workload.prompt_tokens / workload.costs().prefill_tokens_per_s / workload.slots
    if mode == "auto" and reading <= error * together:
        told = f"reading prompts is {reading / together:.1%} of a step of {together:.3g} s"
        return Found(0.0, f"prefill and decoding stay together: {told}, the costs may be wrong by {error:.0%}")
    steps = {share: fmean(_seconds(d, policy, replace(whole, prefill_share=share)) for d in draws)
             for share in _shares(draws[0].slots)}  # fmt: skip
    share = min(steps, key=steps.__getitem__)
    count, ratio = count_of(share, workload.slots), steps[share] / together
    told = f"with {count} of {workload.slots} engines for prompts the simulated step takes {ratio:.3f} times as long"
    if mode == "on" or ratio < 1 - error:
        return Found(share, f"prefill and decoding are apart: {told}")
    return Found(0.0, f"prefill and decoding stay together: {told}, the costs may be wrong by {error:.0%}")


def error_of(fitted: Fit) -> float:
    """Part of a step that costs may be wrong by: that of the kind of work which they tell worst; all, if untold."""
    kinds = ("decoding", "scoring", "training")
    return max((fitted.accuracy[kind].typical for kind in kinds if kind in fitted.accuracy), default=1.0)


def _shares(engines: int) -> Sequence[float]:
    return list({count_of(share, engines): share for share in SHARES}.values())


def _seconds(workload: Workload, policy: str, settings: Settings) -> float:
    """Of a step, with the copies that stall the engines that make or take them, whichever are fewer."""
    result = later_step(workload, policy, settings).result
    if not settings.prefill_share:
        return result.step_s
    readers = count_of(settings.prefill_share, workload.slots)
    copied = result.moved_bytes / workload.link_bytes_per_s / min(readers, workload.slots - readers)
    return result.step_s + copied
