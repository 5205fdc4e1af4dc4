"""The estimate for an H200 reproduces what was recorded, and counts only changes whose code is in the tree."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import h200_estimate
from h200_estimate import CHANGES, TOLERANCE, Change, totals

NOTHING, EVERYTHING = (), tuple(CHANGES)


@pytest.mark.parametrize("total", [t for t in totals(NOTHING) if t.recorded_s], ids=lambda total: total.name)
def test_the_single_costs_add_up_to_what_was_recorded(total):
    assert total.before == pytest.approx(total.recorded_s, rel=TOLERANCE)
    assert total.now == pytest.approx(total.before), "without a change nothing becomes faster"
    assert all(term.source for term in total.terms)


def test_every_change_makes_something_faster_and_none_slower():
    for name in CHANGES:
        without, alone = (
            [term.now for total in totals(counted) for term in total.terms] for counted in (NOTHING, [name])
        )
        assert all(now <= before for now, before in zip(alone, without, strict=True)), name
        least = [total.now for total in totals(EVERYTHING)]
        others = [total.now for total in totals(set(EVERYTHING) - {name})]
        assert alone != without or least != others, f"{name} affects no term"


def test_a_change_counts_if_its_code_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(h200_estimate, "TREE", tmp_path)
    change = Change("rlfuse/some.py", "def faster", "nothing")
    assert not change.built
    (tmp_path / "rlfuse").mkdir()
    (tmp_path / "rlfuse" / "some.py").write_text("def slower(): ...\n")
    assert not change.built
    (tmp_path / "rlfuse" / "some.py").write_text("def faster(): ...\n")
    assert change.built


def test_the_measured_times_replace_the_written_down_ones():
    twice = {"rlfuse": {"core": 9.26, "front": 3.06}, "AsyncLLM": {"core": 27.51, "front": 17.07}}
    slower, faster = (totals(["scheduler"], us)[1] for us in (twice, h200_estimate.MEASURED_US))
    runner = h200_estimate.GRPO.engine_steps * h200_estimate.RUNNER_S
    assert slower.terms[0].now - runner == pytest.approx(2 * (faster.terms[0].now - runner))


def test_the_written_down_times_are_those_of_the_measurements_page():
    page = (Path(h200_estimate.__file__).parent / "README.md").read_text()
    for name, us in h200_estimate.MEASURED_US.items():
        assert f"| {name.replace('AsyncLLM', '`AsyncLLM`')} | {us['core']:.2f} | {us['front']:.2f} |" in page
