"""Looking for the worst workloads: what is changed and taken away, and what is found."""

import json
import random
from itertools import islice
from operator import attrgetter

import pytest

from rlfuse.cli import main
from rlfuse.simulate import stress
from rlfuse.simulate.stress import MOST_SAMPLES, changed, drawn, search, shrink, written
from rlfuse.simulate.workload import WorkloadError, parse

SLEEPY = """
from rlfuse.fusion.decisions import Generate
from rlfuse.fusion.serial import serial


def sleepy(view):
    '''One group at a time, though others wait.'''
    decisions = serial(view)
    admitted = [decision for decision in decisions if isinstance(decision, Generate)]
    if view.in_flight:
        return [decision for decision in decisions if decision not in admitted]
    return [Generate(each.slot, each.groups[:1]) for each in admitted[:1]] or decisions
"""
over_best = attrgetter("over_best")


@pytest.fixture
def sleepy(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SLEEPY)
    return f"{path}:sleepy"


def test_all_that_is_drawn_or_changed_is_a_workload_and_is_read_as_it_was_written():
    rng, refused = random.Random(1), 0
    fields = drawn(rng)
    for _ in range(200):
        fields = changed(fields, rng) if rng.random() < 0.8 else drawn(rng)
        try:
            workload = parse(fields)
        except WorkloadError as error:
            assert "longest sample" in str(error)  # which no cache of that size holds
            refused += 1
            continue
        assert workload.samples <= max(MOST_SAMPLES, workload.group)
        assert parse(written(workload)) == workload
    assert refused < 20


@pytest.fixture
def few(monkeypatch):
    """A quarter of the samples, and of the seconds."""
    monkeypatch.setattr(stress, "MOST_SAMPLES", 16)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_policy_that_wastes_slots_is_found_out_and_the_case_is_small(sleepy):
    tried = list[int]()
    for found, count in search(sleepy, over_best, 2, lambda: 1 - len(tried) / 3):
        assert not found.verdict.broken
        tried.append(count)
    assert tried == [1, 2, 3] and found.verdict.over_best > 0.2
    *_, small = islice(shrink(found, sleepy, over_best), 3)
    assert small.verdict.over_best >= 0.8 * found.verdict.over_best
    assert len(json.dumps(written(parse(small.fields)))) < len(json.dumps(written(parse(found.fields))))


@pytest.mark.slow
def test_a_policy_that_decides_nothing_is_its_users_mistake(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def idle(view):\n    return []\n")
    assert main(["simulate", "--stress", str(tmp_path / "out"), "--policy", f"{path}:idle", "--minutes", "0.1"]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_user_gets_two_workloads_that_can_be_simulated(sleepy, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["simulate", "--stress", str(folder), "--policy", sleepy, "--minutes", "0.03"]) == 0
    printed = capsys.readouterr().out
    assert "sleepy takes" in printed and "longer than the bound" in printed and "workloads" in printed
    assert {path.name for path in folder.iterdir()} == {"over_best.json", "over_bound.json"}
    assert main(["simulate", str(folder / "over_best.json"), "--policy", "serial"]) == 0
