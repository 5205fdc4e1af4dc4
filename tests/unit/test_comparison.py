"""Comparison of two rewards of the same samples: correlations, flips within groups, and disagreements."""

import math

import pandas as pd
import pytest

from rlfuse.tools.evaluation.comparison import ALL, compare


def table(rewards, groups, sources=None):
    count = len(rewards)
    return pd.DataFrame(
        {
            "id": [f"1/{group}/{number}" for number, group in enumerate(groups)],
            "group": groups,
            "data_source": sources or ["x"] * count,
            "prompt": groups,
            "response": [f"answer {number}" for number in range(count)],
            "reward": rewards,
        }
    )


def test_the_same_reward_agrees_with_itself():
    one = table([0.0, 1.0, 0.5, 0.5], ["a", "a", "b", "b"])
    row = compare(one, one).agreement.loc[ALL]
    assert row["pearson"] == row["spearman"] == pytest.approx(1.0)
    assert (row["pairs"], row["flipped"], row["untied"], row["tied"], row["advantage_flipped"]) == (2, 0, 0, 0, 0)
    assert (row["groups"], row["zero_std_before"], row["zero_std_after"]) == (2, 1, 1)


def test_flips_are_counted_between_siblings_only():
    before = table([0.0, 1.0, 10.0, 10.0, 11.0], ["a", "a", "b", "b", "b"])
    after = table([9.0, 8.0, 1.0, 2.0, 2.0], ["a", "a", "b", "b", "b"])
    row = compare(before, after).agreement.loc[ALL]
    assert row["pairs"] == 1 + 3
    assert (row["flipped"], row["untied"], row["tied"]) == (1, 1, 1)
    assert row["advantage_flipped"] == 3  # both of a, and the second of b, first below then above the mean


def test_spearman_depends_only_on_the_order():
    before, after = table([1, 2, 3, 4], list("aabb")), table([1, 10, 100, 1000], list("aabb"))
    row = compare(before, after).agreement.loc[ALL]
    assert row["spearman"] == pytest.approx(1.0) and row["pearson"] < 0.9


def test_each_source_has_a_row_and_separate_ranks():
    sources = ["math", "math", "code", "code"]
    before = table([0.0, 1.0, 100.0, 200.0], list("aabb"), sources)
    after = table([1.0, 0.0, 1.0, 2.0], list("aabb"), sources)
    found = compare(before, after)
    assert found.agreement.loc["math", "pearson"] == pytest.approx(-1.0)
    assert found.agreement.loc["code", "pearson"] == pytest.approx(1.0)
    assert list(found.agreement.index) == ["code", "math", ALL]
    assert list(found.disagreements(2).index) == [0, 1] and list(found.samples["rank_shift"]) == [0.5, -0.5, 0, 0]


def test_samples_without_reward_are_excluded_and_counted():
    before, after = table([0.0, 1.0, None], list("aaa")), table([1.0, 1.0, 1.0], list("aaa"))
    found = compare(before, after)
    assert found.unscored == 1 and len(found.samples) == 2
    assert math.isnan(found.agreement.loc[ALL, "pearson"])


def test_a_table_without_groups_is_grouped_by_prompt():
    before = table([0.0, 1.0], ["a", "a"]).drop(columns=["group", "data_source"])
    found = compare(before, before.assign(reward=[1.0, 0.0]))
    assert found.agreement.loc[ALL, "flipped"] == 1


def test_tables_of_different_samples_are_refused():
    one = table([0.0, 1.0], ["a", "a"])
    with pytest.raises(ValueError, match="its 1 rows differ from the 2 rows of before"):
        compare(one, one[:1])
    with pytest.raises(ValueError, match="after: the table has no column `reward`"):
        compare(one, one.drop(columns="reward"))
