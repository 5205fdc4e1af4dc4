"""Score statistics: means, pass@k and tables, by data source and overall."""

import itertools
import math

import numpy as np
import pytest
from rich.console import Console

from rlfuse.errors import RewardError
from rlfuse.observe.metrics import validation_metrics
from rlfuse.samples import Prompt, Response, Reward, RewardFailure, make_groups
from rlfuse.tools.evaluation import scores
from rlfuse.tools.evaluation.evaluate import check_failures, show


def prompts_of(*sources):
    return [Prompt(i, np.arange(3, dtype=np.int32), "how many?", (), s, "7") for i, s in enumerate(sources)]


def answered(groups, rewards, finish="stop"):
    """Return `groups` with these rewards in order, and responses of increasing length."""
    for number, (sample, reward) in enumerate(zip((s for g in groups for s in g.samples), rewards, strict=True), 1):
        tokens = np.zeros(number, np.int32)
        sample.response = Response(tokens, np.zeros(number, np.float32), finish, 0, f"answer {number}")
        sample.reward = reward
    return groups


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_equals_enumeration(n):
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * passed + [False] * (n - passed)
        share = np.mean([any(chosen) for chosen in itertools.combinations(answers, k)])
        assert scores.pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-12), (passed, k)


def test_pass_at_k_is_precise_for_many_samples():
    expected = 1 - math.comb(9900, 256) / math.comb(10_000, 256)
    assert scores.pass_at_k(10_000, 100, 256) == pytest.approx(expected, rel=1e-9)
    assert scores.k_values(1) == [1] and scores.k_values(6) == [1, 2, 4, 6] and scores.k_values(8) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match="k=3: must be 1 to n=2"):
        scores.pass_at_k(2, 1, 3)


def test_statistics_by_source_and_overall_exclude_failures():
    groups = make_groups(prompts_of("sums", "sums", "words"), 2, 0, 0)
    acc = [Reward(value - 0.25, {"f/acc": value}) for value in (1.0, 0.0, 1.0, 1.0, 0.0)]
    answered(groups, [*acc, RewardFailure("f", "timed out")])
    found = scores.statistics_by_source(groups, 0.5)
    assert list(found) == ["sums", "words", scores.ALL]
    assert found["sums"]["score"] == 0.75 and found["sums"]["reward"] == 0.5 and scores.score_name(groups) == "acc"
    assert found["sums"]["pass@k"] == {1: 0.75, 2: 1.0} and found["sums"]["stderr"] == pytest.approx(0.25)
    assert found["words"] | {"length": None} == {
        "prompts": 1, "samples": 2, "failed": 1, "reward": -0.25, "score": 0.0, "stderr": None, "pass@k": {1: 0.0},
        "best@n": 0.0, "maj@n": None, "finish": {"stop": 2}, "length": None, "parts": {"f/acc": 0.0},
        "coverage": {"f/acc": 0.5},
    }  # fmt: skip
    assert found[scores.ALL]["pass@k"] == {1: 0.5, 2: 1.0}, "pass@2 is over prompts with two scores"
    assert found[scores.ALL]["length"] == {"mean": 3.5, "median": 3.5, "p95": 5.75, "max": 6}


def test_the_score_is_the_mean_of_several_accuracies():
    groups = make_groups(prompts_of("sums"), 2, 0, 0)
    answered(groups, [Reward(2.0, {"f/acc": 1.0, "g/acc": 0.0}), Reward(1.0, {"f/acc": 1.0, "g/acc": 1.0})])
    found = scores.statistics_by_source(groups, 0.5)
    assert found["sums"]["score"] == 0.75 == validation_metrics(groups)["val-core/sums/acc/mean@2"]
    assert found["sums"]["pass@k"] == {1: 0.5, 2: 1.0}
    assert found["sums"]["parts"] == {"f/acc": 1.0, "g/acc": 0.5}
    assert scores.score_name(groups) == "mean of f/acc and g/acc"
    console = Console(record=True, width=200)
    show(found, groups, 0.5, console)
    head, _, row, *_ = (line.split() for line in console.export_text().splitlines() if line.strip())
    assert head == ["data_source", "responses", "acc", "f/acc", "g/acc", "reward", "pass@1"]
    assert row == ["sums", "1", "x", "2", "0.750", "1.000", "0.500", "1.500", "0.500"]


def test_one_accuracy_per_source_is_not_averaged():
    groups = make_groups(prompts_of("sums", "words"), 1, 0, 0)
    answered(groups, [Reward(1.0, {"f/acc": 1.0}), Reward(0.0, {"g/acc": 0.0})])
    assert scores.score_name(groups) == "acc" and scores.averaged_parts(groups) == []
    assert [each["score"] for each in scores.statistics_by_source(groups, 0.5).values()] == [1.0, 0.0, 0.5]


def test_a_missing_accuracy_counts_as_0_and_its_coverage_is_shown():
    groups = make_groups(prompts_of("sums", "sums", "sums", "sums", "words"), 1, 0, 0)
    gated = Reward(0.0, {"gate": 0.0})
    answered(groups, [Reward(1.0, {"gate": 1.0, "f/acc": 1.0}), gated, gated, Reward(0.5, {"gate": 1.0}), Reward(0.75)])
    found = scores.statistics_by_source(groups, 0.25)
    assert [each["score"] for each in found.values()] == [0.25, 0.75, 0.35]
    assert found["sums"]["pass@k"] == {1: 0.25} and validation_metrics(groups)["val-core/sums/acc/mean@1"] == 0.25
    assert found["sums"]["parts"] == found[scores.ALL]["parts"] == {"gate": 0.5, "f/acc": 0.25}, (
        "the source `words` has no parts"
    )
    assert found["sums"]["coverage"] == {"gate": 1.0, "f/acc": 0.25}
    console = Console(record=True, width=200)
    show(found, groups, 0.5, console)
    assert "Responses with this part (a missing part counts as 0): f/acc 25.0%." in console.export_text()


def test_a_source_named_all_is_kept_next_to_the_total():
    groups = answered(make_groups(prompts_of("all", "sums"), 1, 0, 0), [Reward(1.0), Reward(0.0)])
    found = scores.statistics_by_source(groups, 0.5)
    assert {name: each["score"] for name, each in found.items()} == {"all": 1.0, "sums": 0.0, "all sources": 0.5}
    alone = scores.statistics_by_source(groups[:1], 0.5)
    assert list(alone) == ["all"]


def test_samples_without_scores_have_no_mean():
    groups = answered(make_groups(prompts_of("sums"), 1, 0, 0), [RewardFailure("f", "gone")], finish="length")
    found = scores.statistics_by_source(groups, 0.5)
    assert found["sums"]["score"] is None and found["sums"]["pass@k"] == {} and found["sums"]["failed"] == 1
    console = Console(record=True, width=200)
    show(found, groups, 0.5, console)
    printed = console.export_text()
    with pytest.raises(RewardError, match="1 of 1 responses have no reward"):
        check_failures(groups, 0.5)
    check_failures(groups, 1.0)
    assert "100.0%" in printed and "1 responses have no reward" in printed and "f: gone" in printed


def test_a_table_has_a_row_for_each_source_and_a_column_for_each_k():
    groups = answered(make_groups(prompts_of("sums", "[b]words"), 2, 0, 0), [Reward(float(i % 2)) for i in range(4)])
    console = Console(record=True, width=200)
    show(scores.statistics_by_source(groups, 0.5), groups, 0.5, console)
    printed = console.export_text()
    assert all(word in printed for word in ("pass@1", "pass@2", "[b]words", "0.500 ±0.000", "reward is above 0.5"))


def test_best_and_majority_of_several_responses():
    groups = make_groups(prompts_of("sums", "sums"), 4, 0, 0)
    rewards = [
        Reward(value, {"f/acc": value}, pred=pred) for value, pred in zip([1, 0, 0, 1, 0, 0, 0], "7117abc", strict=True)
    ]
    answered(groups, [*rewards, RewardFailure("f", "timed out")])
    best = [1 - (2 / 4) ** 4, 0.0]
    tie = {votes: math.comb(4, votes) / 2**4 for votes in range(5)}  # 7 and 1 have two responses each
    majority = [tie[4] + tie[3] + tie[2] / 2, 0.0]
    metrics, sums = validation_metrics(groups), scores.statistics_by_source(groups, 0.5)["sums"]
    assert metrics["val-core/sums/acc/best@4/mean"] == sums["best@n"] == pytest.approx(np.mean(best))
    assert metrics["val-core/sums/acc/maj@4/mean"] == sums["maj@n"] == pytest.approx(np.mean(majority))
    assert metrics["val-aux/sums/acc/best@2/mean"] == pytest.approx((1 - (2 / 4) ** 2) / 2)
    assert metrics["val-aux/sums/acc/worst@4/mean"] == pytest.approx((2 / 4) ** 4 / 2)
    core = [name for name in metrics if name.startswith("val-core/")]
    assert core == [f"val-core/sums/acc/{name}" for name in ("mean@4", "best@4/mean", "maj@4/mean")]
    console = Console(record=True, width=200)
    show({"sums": sums}, groups, 0.5, console)
    printed = console.export_text()
    assert "best@4" in printed and "maj@4" in printed
