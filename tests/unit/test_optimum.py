"""Optimal schedules of small workloads: computed manually, and between the lower bound and all policies."""

import sys
from pathlib import Path

import pytest

from rlfuse.fusion.policies import POLICIES
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.workload import parse

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from optimum import TICKS, build, optimum

ROUNDED = 30 / TICKS
"""Maximum rounding error in seconds for a step of a dozen samples."""


def workload(lengths, slots, lanes):
    engine = {"step_base_s": 0.02, "step_per_context_token_s": 0.0, "prefill_tokens_per_s": 1e9}
    return parse(
        {
            "slots": slots,
            "response_tokens": lengths,
            "prompt_tokens": 1,
            "engine": engine | {"flat_batch": lanes, "max_sequences": lanes},
            "scoring": {"tokens_per_s": 100},
            "training": {"tokens_per_s": 50, "mini_batches": 2},
            "switch_s": 0.2,
        }
    )


def test_optimum_of_two_samples_on_one_slot():
    # 99 + 49 decode steps, then a switch, both scoring passes, both mini-batches, and the switch back.
    solved = optimum(workload([99, 49], 1, 1), 10, workers=1)
    assert solved.least == solved.found == pytest.approx(148 * 0.02 + 0.2 + 1.5 + 3.0 + 0.2)


def test_optimum_scores_on_the_first_free_slot():
    # The short sample is trained on during generation; the long one is scored and trained on when it is finished.
    solved = optimum(workload([49, 199], 2, 1), 10, workers=1)
    assert solved.least == solved.found == pytest.approx(199 * 0.02 + 2.0 + 4.0 + 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_optimum_is_between_the_bound_and_all_policies(seed):
    small = build(((2, 8), 2, 0.6, 0.2), seed)
    solved = optimum(small, 3, workers=1)
    assert lower_bound(small).seconds <= solved.found + ROUNDED and solved.least <= solved.found
    assert all(simulate(small, policy).result.step_s >= solved.least for policy in POLICIES)
