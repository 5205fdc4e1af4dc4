"""Inputs of `rlfuse simulate`: published schemas, examples, and all errors reported at once."""

import importlib.resources
import json

import pytest
from jsonschema import Draft202012Validator
from test_simulate_workload import FULL, WRONG

from rlfuse.cli import main
from rlfuse.config.input_files import read_json, schema_of
from rlfuse.simulate.workload import EXAMPLE as WORKLOAD_EXAMPLE
from rlfuse.simulate.workload import Workload, WorkloadError

FILES = {Workload: ("rlfuse.simulate", "workload")}


def schema_file(cls):
    package, name = FILES[cls]
    return json.loads(importlib.resources.files(package).joinpath(f"{name}.schema.json").read_text())


@pytest.mark.parametrize(("cls", "command"), [(Workload, "simulate")])
def test_published_schema_matches_the_validation(cls, command, capsys):
    Draft202012Validator.check_schema(schema_file(cls))
    assert main([command, "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_file(cls), f"regenerate it: rlfuse {command} --schema FILE"
    assert schema_of(cls)["$schema"] == Draft202012Validator.META_SCHEMA["$id"]


@pytest.mark.parametrize(
    ("cls", "data"),
    [
        (Workload, WORKLOAD_EXAMPLE),
        (Workload, FULL | {"$schema": "workload.schema.json", "length_history_sigma": None, "slots": 16.0}),
    ],
)
def test_valid_inputs_satisfy_the_published_schema(cls, data):
    assert not list(Draft202012Validator(schema_file(cls)).iter_errors(json.loads(json.dumps(data))))


FORMS = ("slot_speed", "failures", "bubbles", "deferred", "by_update", "'group': 2", "'kv_tokens': 1000")


@pytest.mark.parametrize("change", [change for change, _ in WRONG])
def test_inputs_with_invalid_fields_violate_the_published_schema(change):
    form = any(word in str(change) for word in FORMS)
    empty = change in ({"response_tokens": []}, {"training": {"models": []}})
    valid = Draft202012Validator(schema_file(Workload)).is_valid(FULL | change)
    assert valid == (form or empty or "nan" in str(change)), "the schema covers neither combinations of fields nor NaN"


@pytest.mark.slow
@pytest.mark.parametrize(("command", "more"), [("simulate", ["--policy", "serial"])])
def test_examples_run_unchanged(command, more, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RLFUSE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "example.json"
    assert main([command, "--example", str(path)]) == 0
    assert f"next: rlfuse {command} {path}" in capsys.readouterr().out
    assert main([command, str(path), *more]) == 0
    assert "bound" in capsys.readouterr().out
    assert main([command, "--example", str(path)]) == 2 and "File exists" in capsys.readouterr().err
    assert main([command, "--example"]) == 0 and capsys.readouterr().out == path.read_text()
    assert main([command]) == 2 and "--example shows one" in capsys.readouterr().err


def test_all_errors_of_a_file_are_reported_with_their_lines(tmp_path, capsys):
    path = tmp_path / "workload.json"
    path.write_text(
        '{\n"slot": 4,\n"switch_s": -1,\n"scoring": {\n  "kinds": ["ref", "refs"]},\n"response_tokens": {}}'
    )
    assert main(["simulate", str(path)]) == 2
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(
        [
            f"{path}: slots is missing: add it to the workload",
            f"{path}:2: slot: unknown field; did you mean slots?",
            f"{path}:3: switch_s=-1: needs a number of at least 0, at most 1,000,000,000",
            f"{path}:5: scoring.kinds[1]='refs': needs one of old_log_prob, ref, values",
            f"{path}:6: response_tokens.lognormal is missing: add it to response_tokens",
            f"{path}:6: response_tokens.count is missing: add it to response_tokens",
        ]
    )


def test_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "numbers.json").write_bytes(b'\xef\xbb\xbf{"slots": 4}')
    assert read_json(tmp_path / "numbers.json", dict, "workload", WorkloadError) == {"slots": 4}
