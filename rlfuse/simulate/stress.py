"""The workloads on which a policy does worst: simulated annealing over all that a workload can be.

Role: `rlfuse simulate --stress`. A workload is changed in one way after the other; what makes the policy lose more,
against the best of the built-in ones or against the bound, is kept (after Collie, NSDI '22, which looks for anomalies
of networks like this). What it loses against another policy counts as far as it is not one draw's chance. What breaks a
rule of the machine counts as worst. In the end everything is taken from the workload that its regret does not need.
Pure.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from statistics import fmean
from typing import Any

from rlfuse.config.input_files import WorkloadError
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.own_policies import PolicyError
from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.tuning import resample, tune
from rlfuse.simulate.workload import Workload, parse

MOST_SAMPLES = 64
"""Of a workload that is tried: a second or two for all policies, tuned."""
HOT, COLD = 0.05, 0.002
"""Regret that is given up for a change, at the start and at the end."""
STUCK = 40
"""Changes in a row that were not taken, after which another workload is drawn."""
KEPT = 0.8
"""Share of the regret that has to be left when something is taken away."""
OTHERS = range(100, 108)
"""Seeds of other draws that a regret is held against; tuning has others."""

Json = dict[str, Any]

AXES: Mapping[str, Sequence[Any]] = {
    "slots": (1, 2, 3, 4, 6, 8),
    "group": (1, 2, 4, 8),
    "prompt_tokens": (1, 64, 512, 2048),
    "engine.step_per_sequence_s": (0.0, 1e-4, 1e-3, 5e-3),
    "engine.step_per_context_token_s": (0.0, 2e-8, 1e-6),
    "engine.flat_batch": (1, 4, 16, 64),
    "engine.max_sequences": (2, 4, 16, 256),
    "engine.kv_tokens": (8_000, 400_000),
    "engine.prefill_tokens_per_s": (2_000.0, 20_000.0),
    "scoring.tokens_per_s": (500.0, 2_000.0, 8_000.0, 40_000.0),
    "scoring.call_s": (0.0, 0.05, 0.5),
    "scoring.kinds": (["old_log_prob"], [], ["old_log_prob", "ref"], ["old_log_prob", "ref", "values"]),
    "scoring.deferred": (False, True),
    "scoring.by_update": (False, True),
    "training.tokens_per_s": (8_000.0, 300.0, 1_000.0, 3_000.0),
    "training.mini_batches": (1, 2, 4),
    "training.call_s": (0.0, 0.05, 0.5),
    "training.optimizer_s": (0.0, 0.1, 1.0),
    "training.models": (["actor"], ["critic", "actor"]),
    "training.epochs": (1, 2),
    "training.early": (True, False),
    "training.critic_early": (True, False),
    "training.bubbles": (None, 0.1, 0.5),
    "lockstep": ("none", "gradients", "all"),
    "switch_s": (0.0, 0.1, 0.5, 2.0),
    "move_s": (0.02, 0.0, 0.5),
    "kv_bytes_per_token": (0.0, 100_000.0),
    "link_bytes_per_s": (0.0, 1e8, 2.5e10),
    "length_history_sigma": (None, 0.0, 0.3, 1.0),
    "credit_samples": (None, 1, 4, 16),
    "slowdowns": ([],),
    "failures": ([],),
}
"""Path of a field -> what it may be; the first is the plainest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a workload; `broken`: the rule that was broken, empty where none was."""

    steps: Mapping[str, float]
    """Policy -> seconds."""
    over_best: float
    """Part by which the policy's step is longer than the best other one's, beyond a switch (`tolerance`): on these
    lengths, or in the mean of other draws of them if that is less."""
    over_bound: float
    broken: str = ""


class Broken(Exception):
    """A policy took less than the bound."""


def tolerance(workload: Workload) -> float:
    """Seconds that a policy may lose without a fault of its own: a switch; where engines are lost, a sample, too.

    An engine takes what it holds along: at the same second, one policy may lose a sample that another had finished.
    """
    if not workload.failures:
        return workload.switch_s
    tokens, costs = workload.longest + workload.prompt_tokens, workload.costs()
    again = workload.longest * costs.step_base_s / min(speed.least for speed in workload.speeds())
    later = tokens / costs.score_tokens_per_s + tokens / costs.train_tokens_per_s
    later += costs.score_call_s + costs.train_call_s
    return workload.switch_s + workload.move_s + again + later


def judge(workload: Workload, policy: str) -> Verdict:
    """The policy against all built-in ones, each tuned. Raises PolicyError for what is the policy's own mistake."""
    try:
        settings = {name: tune(workload, name) for name in dict.fromkeys((policy, *POLICIES))}
        steps, bound = _simulated(workload, settings)
        if (over_best := _regret(steps, policy, tolerance(workload))) > 0:
            over_best = min(over_best, _regret(_mean_of_others(workload, settings), policy, tolerance(workload)))
    except (WorkloadError, PolicyError):
        raise
    except Broken as rule:
        return Verdict({}, math.inf, math.inf, str(rule))
    except Exception as error:  # whatever else it is, no workload may lead there
        return Verdict({}, math.inf, math.inf, f"{type(error).__name__}: {error}")
    return Verdict(steps, over_best, steps[policy] / bound - 1)


def _simulated(workload: Workload, settings: Mapping[str, Settings]) -> tuple[dict[str, float], float]:
    """Each policy's step, and the bound, in seconds."""
    results = {name: simulate(workload, name, each).result for name, each in settings.items()}
    for name, result in results.items():
        if result.step_s < result.oracle_s * (1 - 1e-9):
            raise Broken(f"{name} took {result.step_s} s, the bound is {result.oracle_s}")
    return {name: result.step_s for name, result in results.items()}, next(iter(results.values())).oracle_s


def _mean_of_others(workload: Workload, settings: Mapping[str, Settings]) -> dict[str, float]:
    """Each policy's step in the mean of other draws of the lengths: of few samples one draw is chance as well."""
    lengths = workload.lengths().tolist()
    draws = [replace(workload, response_tokens=resample(lengths, workload.group, workload.samples, n)) for n in OTHERS]
    found = [_simulated(draw, settings)[0] for draw in draws]
    return {name: fmean(steps[name] for steps in found) for name in settings}


def _regret(steps: Mapping[str, float], policy: str, tolerated: float) -> float:
    best = min((seconds for name, seconds in steps.items() if name != policy), default=steps[policy])
    return (steps[policy] - tolerated) / best - 1


# Changes -------------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random) -> Json:
    """Any workload."""
    found: Json = {"slots": 1, "response_tokens": _lengths(rng)}
    for path in AXES:
        _put(found, path, _value(path, rng, found["slots"]))
    return _agreeing(found)


def changed(given: Json, rng: random.Random) -> Json:
    """Another in one or two respects."""
    found = json.loads(json.dumps(given))
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.3:
            found["response_tokens"] = _some_changed(found["response_tokens"], rng)
        else:
            path = rng.choice(tuple(AXES))
            _put(found, path, _value(path, rng, found["slots"]))
    return _agreeing(found)


def _value(path: str, rng: random.Random, slots: int) -> Any:
    if path == "slowdowns" and rng.random() < 0.2:
        slot, rate, begin = rng.randrange(slots), rng.choice((0.5, 2.0, 5.0)), rng.choice((0.0, 1.0, 3.0))
        return [{"slot": slot, "rate": rate, "from_s": begin, "until_s": rng.choice((None, begin + 2.0))}]
    if path == "failures" and rng.random() < 0.2 and slots > 1:
        return [{"slot": rng.randrange(slots), "at_s": rng.choice((0.5, 2.0, 5.0))}]
    return rng.choice(AXES[path])


def _lengths(rng: random.Random) -> list[int]:
    """A mixture of two log-normal distributions."""
    median, sigma, longer = rng.choice((20, 60, 200)), rng.choice((0.1, 0.6, 1.2)), rng.choice((1, 4, 16))
    share = rng.choice((0.0, 0.05, 0.3))
    medians = [median * (longer if rng.random() < share else 1) for _ in range(rng.choice((4, 12, 24, 48, 64)))]
    return [max(1, min(2000, round(each * math.exp(rng.gauss(0, sigma))))) for each in medians]


def _some_changed(lengths: list[int], rng: random.Random) -> list[int]:
    """Another mixture; or some are longer, in another order, twice as many or half as many."""
    some, half = list(lengths), max(1, len(lengths) // 2)
    some[rng.randrange(len(some))] = rng.choice((1, 10, 100, 1000))
    changes = (_lengths(rng), some, rng.sample(lengths, len(lengths)), lengths * 2, lengths[:half], lengths[half:])
    return list(rng.choice(changes)) or lengths


def _agreeing(found: Json) -> Json:
    """With the fields that hang together made to."""
    slots, group = found["slots"], found["group"]
    whole = min(len(found["response_tokens"]), MOST_SAMPLES) // group * group
    found["response_tokens"] = (found["response_tokens"] * group)[: whole or group]
    for name in ("slowdowns", "failures"):
        found[name] = [each for each in found[name] if each["slot"] < slots and (slots > 1 or name == "slowdowns")]
    if found["training"]["bubbles"] is not None:
        found["lockstep"] = "all"
    else:
        found["scoring"]["deferred"] = False
    if "critic" not in found["training"]["models"]:
        found["scoring"]["kinds"] = [kind for kind in found["scoring"]["kinds"] if kind != "values"]
    found["scoring"]["by_update"] &= "old_log_prob" in found["scoring"]["kinds"]
    return found


def _put(found: Json, path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        found = found.setdefault(group, {})
    found[name] = value


# The search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """A workload, as JSON, and what became of it."""

    fields: Json
    verdict: Verdict


def search(
    policy: str, regret: Callable[[Verdict], float], seed: int, left: Callable[[], float]
) -> Iterator[tuple[Tried, int]]:
    """The worst workload so far and how many were tried, after each of them, until a rule is broken or no time is left.

    `left`: of the time, from 1 to 0. Raises PolicyError.
    """
    rng, refused, count = random.Random(seed), STUCK, 0
    now = worst = None
    while worst is None or (left() > 0 and not worst.verdict.broken):
        fresh = now is None or refused >= STUCK
        tried = _tried(drawn(rng) if now is None or fresh else changed(now.fields, rng), policy)
        if tried is None:
            continue
        count += 1
        gain = 0.0 if now is None or fresh else regret(tried.verdict) - regret(now.verdict)
        if gain >= 0 or rng.random() < math.exp(gain / (COLD * (HOT / COLD) ** max(0.0, left()))):
            now, refused = tried, 0 if gain or fresh else refused + 1
        else:
            refused += 1
        if worst is None or regret(tried.verdict) > regret(worst.verdict):
            worst = tried
        yield worst, count


def shrink(found: Tried, policy: str, regret: Callable[[Verdict], float]) -> Iterator[Tried]:
    """The same after each simpler workload that was tried, without what its regret does not need."""
    least = KEPT * regret(found.verdict)
    simpler = _simpler(found.fields) if least > 0 else iter(())
    while (fields_ := next(simpler, None)) is not None:
        tried = _tried(fields_, policy)
        if tried and regret(tried.verdict) >= least:
            found = tried
            simpler = _simpler(found.fields)
        yield found


def _tried(given: Json, policy: str) -> Tried | None:
    """None where the fields don't go together."""
    try:
        return Tried(given, judge(parse(given), policy))
    except WorkloadError:
        return None


def _simpler(given: Json) -> Iterator[Json]:
    """With fewer samples or slots, or a field at its plainest."""
    lengths, group = given["response_tokens"], given["group"]
    for keep in (lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :], lengths[:-group], lengths[group:]):
        if keep and len(keep) % group == 0:
            yield given | {"response_tokens": keep}
    if given["slots"] > 1:
        yield _agreeing(json.loads(json.dumps(given | {"slots": given["slots"] - 1})))
    for path, (plainest, *_) in AXES.items():
        simple = json.loads(json.dumps(given))
        if path != "slots":
            _put(simple, path, plainest)
            if (simple := _agreeing(simple)) != given:
                yield simple


def written(workload: Workload) -> Json:
    """As the JSON that is read again, without what is as by default."""
    return json.loads(json.dumps(_without_defaults(workload)))


def _without_defaults(value: Any) -> Any:
    if isinstance(value, tuple):
        return [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in value]
    if not is_dataclass(value):
        return value
    found = {}
    for entry in fields(value):
        own = getattr(value, entry.name)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if own != default:
            found[entry.name] = _without_defaults(own)
    return found
