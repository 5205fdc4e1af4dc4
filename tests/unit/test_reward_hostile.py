"""Rewards with unusual exceptions and results: each affects only its sample and is shown with the user's line."""

import math
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import hostile_rewards as hostile
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_rows import score_table

from rlfuse.config.rewards import RewardEntry
from rlfuse.errors import RewardError
from rlfuse.rewards.api.combine import compose
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import Score, item_of_row
from rlfuse.samples import Reward, RewardFailure

FILE = Path(hostile.__file__)
WAYS = [f"way {number}" for number in range(len(hostile.WAYS))]


def scored(function, *responses):
    rows = [{"prompt": "p", "response": response} for response in responses]
    return load_function(function).score([item_of_row(row) for row in rows], 20.0)


def check(outcome, name):
    """Check that an outcome can be printed, saved and pickled, and that failures have a name."""
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    if type(outcome) is Score:
        numbers = [*outcome.extras.values(), *([] if outcome.value is None else [outcome.value])]
        assert all(type(number) is float and math.isfinite(number) for number in numbers)
        texts = [*outcome.extras, *outcome.notes, *outcome.notes.values()]
    else:
        assert type(outcome) is RewardFailure and outcome.function == name and outcome.message
        texts = [outcome.message, outcome.traceback]
    assert all(type(text) is str and text.encode() is not None and len(text) < 25_000 for text in texts)


@pytest.mark.parametrize("name", ["single", "later"])
def test_any_exception_or_result_affects_only_its_sample(name):
    late = [f"late {number}" for number in range(len(hostile.LATE))] if name == "later" else []
    first, *found, last = scored(getattr(hostile, name), "good", *WAYS, *late, "good")
    assert first == last == Score(1.0)
    for outcome in found:
        check(outcome, name)
        assert f'File "{FILE}", line' in outcome.traceback, outcome


def test_any_batch_result_affects_only_its_sample():
    first = len(hostile.ERRORS)  # they fail a whole call, which the pool repeats one by one
    good, *found = scored(hostile.several, "good", *WAYS[first:])
    assert good == Score(1.0)
    for act, outcome in zip(hostile.WAYS[first:], found, strict=True):
        check(outcome, "several")
        assert (outcome == Score(None)) == (act() is None)  # valid for this signature: does not apply


odd = st.one_of(st.sampled_from(hostile.WAYS), st.integers(-(10**320), 10**320).map(lambda number: lambda: number))
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.characters(categories=["Cs"]) | odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def call_nested(value):
    """Call nested callables."""
    if isinstance(value, list):
        return [call_nested(each) for each in value]
    if isinstance(value, dict):
        return {key: call_nested(each) for key, each in value.items()}
    return value() if callable(value) else value


def verl(act):
    return lambda solution_str: act()


def verl_batch(act):
    return lambda solution_strs: [act(), {"score": 1.0, "more": act()}]


def trl(act):
    def function(completions, log_metric, log_extra):
        log_extra("extra", act())
        log_metric("metric", act())
        return [act(), 1.0]

    return function


def openrlhf(act):
    return lambda queries: {"rewards": [1.0, act()], "scores": act(), "extra_logs": {"more": act()}}


def samples(act):
    return lambda samples: [Reward(act(), {"part": act()}, act()), RewardFailure(act(), act(), act())]


@pytest.mark.slow
@given(values, st.sampled_from([verl, verl_batch, trl, openrlhf, samples]))
@settings(max_examples=150, deadline=None)
def test_outcomes_are_plain_data_for_any_result(value, shape):
    def act():
        return call_nested(value)

    function = shape(act)
    function.__name__ = "act"
    outcomes = scored(function, "one", "two")
    assert len(outcomes) == 2
    for outcome in outcomes:
        check(outcome, "act")


@pytest.mark.parametrize("kind", ["chained", "grouped"])
def test_thousands_of_nested_exceptions_are_shown_briefly_and_fast(kind):
    def raises(solution_str):
        error = ValueError("first")
        for number in range(20_000):
            later = ValueError(number) if kind == "chained" else ExceptionGroup("several", [error])
            later.__context__, error = error if kind == "chained" else None, later
        raise error

    began = time.process_time()
    [outcome] = scored(raises, "r")
    assert time.process_time() - began < 20
    check(outcome, "raises")
    assert (
        f'File "{__file__}"' in outcome.traceback and "more than 100 linked exceptions are omitted" in outcome.traceback
    )


def unused(solution_str):
    return 1.0


def requiring(solution_str, odd):
    return 1.0


def requiring_batched(completions, odd):
    return [1.0] * len(completions)


def taking_samples(samples):
    return [1.0] * len(samples)


@pytest.mark.parametrize(
    ("function", "costs"), [(unused, False), (requiring, True), (requiring_batched, True), (taking_samples, True)]
)
def test_an_uncopyable_cell_fails_only_its_sample(function, costs):
    rows = [{"prompt": "p", "response": "r", "odd": odd} for odd in (threading.Lock(), (x for x in ()), os, [1])]
    *odd, plain = score_table(function, rows)
    assert plain["reward"] == 1.0
    for row in odd:
        assert row["reward"] == (None if costs else 1.0)
        assert (
            not costs
            or f"{function.__name__}: column 'odd' can't be copied for a reward function (Type" in row["failure"]
        )


def test_an_interrupt_by_the_user_is_not_a_failure():
    # Ctrl-C ends scoring even if the function catches it; KeyboardInterrupt of the function is a failure.
    def swallows(solution_str):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
        except BaseException:
            return 1.0

    def passes_on(solution_str):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore SIGINT
    try:
        for function in (swallows, passes_on):
            with pytest.raises(KeyboardInterrupt):
                score_table(function, [{"prompt": "p", "response": "r"}])
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        [row] = score_table(hostile.single, [{"prompt": "p", "response": "way 0"}])
        assert row["failure"] == "single: KeyboardInterrupt: (no message)" and "raise error()" in row["traceback"]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "GeneratorExit", "type('Wild', (BaseException,), {})"])
def test_errors_of_files_and_factories_name_them(tmp_path, error):
    path = tmp_path / "raises.py"
    path.write_text(f"raise {error}\n")
    with pytest.raises(RewardError, match=rf"(?s)raises.py:f' can't be imported: .*{path}"):
        load_function(f"{path}:f")

    def make(most):
        raise hostile.Wild("no")

    with pytest.raises(RewardError, match="failed: Wild: no"):
        load_function(make, {"most": 1})


@pytest.mark.parametrize("values", [(1e308, 1e308), (math.inf, -math.inf), (1e39, 0.0)])
def test_a_sum_beyond_float32_is_a_failure(values):
    # Each value may be finite while the weighted sum exceeds float32 or float64.
    entries = [RewardEntry("m:a", "a", values[0]), RewardEntry("m:b", "b", values[1])]
    failure = compose(entries, "", {"a": Score(1.0), "b": Score(1.0)})
    assert type(failure) is RewardFailure and "lower the weights, or set clip" in failure.message
