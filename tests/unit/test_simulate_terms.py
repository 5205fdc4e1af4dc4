"""Cost terms of other systems: by default none, each with a source, and each in the direction that its paper says."""

import json
from dataclasses import fields, replace

import pytest
from test_simulate_workload import FULL

from rlfuse.cli import main
from rlfuse.simulate.bound import lower_bound
from rlfuse.simulate.runner import simulate
from rlfuse.simulate.terms import SOURCES, Parts, Terms
from rlfuse.simulate.workload import WorkloadError, parse, read_workload

PARTS = {"tensor_parallel": 0.3, "all_to_all": 0.2, "attention": 0.3}
SMALL = {
    "slots": 4,
    "response_tokens": {"lognormal": {"median": 60, "sigma": 1.0}, "cap": 300, "count": 64},
    "prompt_tokens": 50,
    "engine": {"flat_batch": 4, "step_per_context_token_s": 1e-5, "kv_tokens": 2_000},
    "scoring": {"tokens_per_s": 2000},
    "training": {"tokens_per_s": 2000, "mini_batches": 2},
    "restart_s": 5.0,
    "failures": [{"slot": 0, "at_s": 1.0}],
    "parts": PARTS,
}
SOME = {  # a value of each that is not its default -> what becomes of the step
    "tensor_parallel_overlap": (0.96, "shorter"),
    "nano_batches": (1.91, "shorter"),
    "all_to_all_speedup": (1.5, "shorter"),
    "all_to_all_bytes": (0.5, "shorter"),
    "kv_resident": (0.2, "shorter"),
    "attention_density": (0.3, "shorter"),
    "full_attention": (0.0, "shorter"),
    "interference": (0.2, "longer"),
    "fault_radius": (4, "longer"),
}


def seconds(workload):
    return simulate(workload, "stream").result.step_s


def test_every_term_has_a_source_and_without_terms_nothing_changes():
    assert [entry.name for entry in fields(Terms)] == list(SOURCES) == list(SOME)
    assert all("arXiv" in source.says for source in SOURCES.values())
    plain, stated = parse(FULL), parse(FULL | {"parts": PARTS, "terms": {}})
    assert stated.costs() == plain.costs()
    assert lower_bound(stated) == lower_bound(plain)


@pytest.mark.parametrize("name", SOME)
def test_each_term_moves_the_step_and_its_bound_as_its_paper_says(name):
    value, becomes = SOME[name]
    without, given = parse(SMALL), parse(SMALL | {"terms": {name: value}})
    before, after = seconds(without), seconds(given)
    assert (after < before) == (becomes == "shorter") and after != before
    assert lower_bound(given).seconds <= after * (1 + 1e-9)


@pytest.mark.parametrize("name", ["nano_batches", "all_to_all_speedup", "interference"])
def test_more_of_a_term_is_more_of_its_effect(name):
    steps = [seconds(parse(SMALL | {"terms": {name: value}})) for value in (1.0, 2.0, 4.0)]
    assert steps == sorted(steps, reverse=name != "interference") and len(set(steps)) == 3


def test_nano_batches_leave_a_batch_that_is_flat_as_it_is():
    few = SMALL | {"response_tokens": [50] * 4, "engine": SMALL["engine"] | {"step_per_context_token_s": 0.0}}
    assert seconds(parse(few)) == seconds(parse(few | {"terms": {"nano_batches": 1.91}}))


def test_a_domain_is_lost_whole_and_no_slot_twice():
    failures = [{"slot": 5, "at_s": 1.0}, {"slot": 4, "at_s": 1.0}]
    workload = parse(FULL | {"slots": 6, "failures": failures, "terms": {"fault_radius": 4}})
    assert sorted(workload.losses()) == [(4, 1.0), (5, 1.0)], "the last domain is smaller"
    alone = replace(workload, terms=Terms())
    assert alone.losses() == [(5, 1.0), (4, 1.0)]


def test_a_cache_that_is_partly_away_holds_samples_that_it_has_no_room_for():
    longer = SMALL | {"engine": {"kv_tokens": 100}}
    with pytest.raises(WorkloadError, match="kv_tokens=100: the longest sample holds"):
        parse(longer)
    assert parse(longer | {"terms": {"kv_resident": 0.2}}).costs().kv_tokens == 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": {"attention": 1}}, r"parts.attention=1: needs a number of at least 0, at most 0.99"),
        ({"parts": {"attention": 0.6, "all_to_all": 0.5}}, r"parts are 1.1 together: .*at most 0.99"),
        ({"terms": {"nano_batches": 0.5}}, r"terms.nano_batches=0.5: needs a number of at least 1"),
        ({"terms": {"kv_resident": 0}}, r"terms.kv_resident=0: needs a number above 0, at most 1"),
        ({"terms": {"fault_radius": 1.5}}, r"terms.fault_radius=1.5: needs a whole number"),
        ({"terms": {"nano_batch": 2}}, r"terms.nano_batch: unknown field; did you mean terms.nano_batches\?"),
        ({"terms": {"all_to_all_bytes": 0.5}}, r"terms.all_to_all_bytes=0.5: changes nothing while parts.all_to_all"),
    ],
)
def test_what_is_wrong_is_named_with_the_value_and_the_remedy(change, message):
    with pytest.raises(WorkloadError, match=message):
        parse(FULL | change)


def test_explain_lists_terms_sources_and_what_each_makes_of_the_step(tmp_path, capsys):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(SMALL | {"parts": {"attention": 0.3}, "terms": {"interference": 0.2}}))
    assert main(["simulate", "--explain", str(path), "--policy", "stream"]) == 0
    told = capsys.readouterr().out
    rows = {words[0]: words[1:] for line in told.partition("parts:")[2].splitlines()[2:] if (words := line.split())}
    here = read_workload(path)
    assert list(rows) == list(SOURCES) and f"stream: {seconds(here):.2f} s a step" in told
    assert rows["interference"] == ["0.2", "-", f"{seconds(replace(here, terms=Terms())):.2f}", "s", "-"]
    linear = replace(here, terms=replace(here.terms, full_attention=0.0))
    assert rows["full_attention"][-2:] == [f"{seconds(linear):.2f}", "s"]
    assert rows["tensor_parallel_overlap"] == ["0", "0.96", "-", "-"], "it has nothing to change"
    assert here.parts == Parts(attention=0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--threshold", "0.2", "--out", "x.json"],
            "--explain goes with a WORKLOAD.json and a --policy, not with --out",
        ),
        (["--policy", "serial", "stream"], "--explain simulates one policy; --policy gives 2"),
        (["--policy", "strem"], "--policy strem: unknown policy; did you mean stream?"),
    ],
)
def test_what_explain_can_not_do_is_one_line(arguments, message, capsys):
    assert main(["simulate", "--explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
