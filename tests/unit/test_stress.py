"""Looking for the worst workloads: what is changed and taken away, and what is found."""

import json
import random
from itertools import islice
from operator import attrgetter

import pytest

from rlfuse.cli import main
from rlfuse.fusion.decisions import Settings
from rlfuse.simulate import stress
from rlfuse.simulate.stress import MOST_SAMPLES, changed, drawn, judge, search, shrink, written
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
UNLUCKY = """
139 197 339 260 197 179 252 538 107 139 242 67 67 91 139 201 253 131 120 96 260 242 253 171 603 67 80 179 92
92 110 603 92 265 443 110 201 603 91 252 260 179 443 120 201 171 538 107 107 252 339 96 120 201 131 110 265
179 253 339 96 265 80 252
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
    """A quarter of the samples and of the other draws, and of the seconds."""
    monkeypatch.setattr(stress, "MOST_SAMPLES", 16)
    monkeypatch.setattr(stress, "OTHERS", range(100, 102))


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
def test_what_one_draw_loses_by_chance_is_no_regret(monkeypatch):
    monkeypatch.setattr(stress, "tune", lambda workload, policy: Settings(threshold=0.0))
    lengths = [int(each) for each in UNLUCKY.split()]  # known badly, the longest first ends late; so do no others
    engine = {"step_per_sequence_s": 0.001, "flat_batch": 4, "max_sequences": 4, "prefill_tokens_per_s": 20_000}
    training = {"tokens_per_s": 3000, "mini_batches": 4, "call_s": 0.05, "optimizer_s": 0.1, "bubbles": 0.5}
    one = {"slots": 3, "response_tokens": lengths, "group": 8, "prompt_tokens": 2048, "engine": engine}
    one |= {
        "scoring": {"kinds": [], "call_s": 0.5},
        "training": training | {"epochs": 2},
        "lockstep": "all",
        "switch_s": 0.0,
    }
    verdict = judge(parse(one | {"length_history_sigma": 1.0}), "adaptive")
    assert verdict.steps["adaptive"] > 1.05 * min(verdict.steps.values())
    assert -0.05 < verdict.over_best < 0


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
