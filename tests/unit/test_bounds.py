"""Small files with exponential expansion or oversized numbers are refused quickly, with a message naming the file."""

import csv
import time

import pandas as pd
import pytest
import yaml

from rlfuse.cli import main as rlfuse
from rlfuse.config.input_files import InputError, read_json
from rlfuse.config.job_file import read as read_job
from rlfuse.data.rows import read_rows
from rlfuse.errors import ConfigError, DataError, RunError
from rlfuse.files import read_rows as read_run_rows
from rlfuse.parsing import parse_json, parse_yaml
from rlfuse.tools.evaluation.comparison import compare
from rlfuse.tools.evaluation.replay import write

DIGITS = "1" * 5000
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
JOBS = {
    LAUGHS: "aliases (*name) expand to more than 100,000 values",
    MERGES: "aliases (*name) expand to more than 100,000 values",
    f"reward: {{functions: &f [1, 2, 3]}}\n{LAUGHS}": "aliases",
    "a: &a [*a]": "nested too deep",
    "a: &a {b: *a}": "nested too deep",
    "a: " + "[" * 20_000: "",
    "{a: " * 20_000: "",
    f"rollout: {{n: {DIGITS}}}": "an integer has more than 4,300 digits",
    f"rollout.n: -{DIGITS}": "an integer has more than 4,300 digits",
    "a: *missing": "",
    "? [a]\n: b": "",
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words"), JOBS.items(), ids=lambda value: value[:25])
@pytest.mark.parametrize("command", ["plan", "translate"])
def test_a_malicious_job_file_is_refused_quickly(tmp_path, capsys, command, text, words):
    (tmp_path / "job.yaml").write_text(text)
    began = time.process_time()
    assert rlfuse([command, str(tmp_path / "job.yaml")]) == 2
    shown = capsys.readouterr().err
    assert time.process_time() - began < 5 and words in shown and "Traceback" not in shown
    assert "job.yaml" in shown


@pytest.mark.slow
def test_a_malicious_preset_is_refused_quickly(tmp_path, capsys):
    (tmp_path / "lengths").mkdir()
    (tmp_path / "lengths" / "long.yaml").write_text(LAUGHS)
    assert rlfuse(["plan", "--config-dir", str(tmp_path), "experiment=quickstart", "+lengths=long"]) == 2
    assert f"{tmp_path}/lengths/long.yaml: its aliases (*name) expand to more" in capsys.readouterr().err


def test_aliases_with_little_repetition_are_accepted(tmp_path):
    text = "trainer: {total_epochs: &n 2}\nrollout: {n: *n}\nx: &x [" + "1, " * 5000 + "1]\ny: [*x, *x, *x, *x, *x]"
    assert parse_yaml(text)["rollout"] == {"n": 2} and len(parse_yaml(text)["y"][4]) == 5001
    (tmp_path / "job.yaml").write_text(text.partition("\nx:")[0])
    assert read_job(tmp_path / "job.yaml").settings["rollout.n"][1] == 2
    assert parse_yaml("") is None and parse_yaml("a: ${oc.env:HOME}") == {"a": "${oc.env:HOME}"}


ROWS = {
    f'{{"prompt": "a", "n": {DIGITS}}}': "an integer has more than 4,300 digits; write it as a string",
    f'{{"prompt": "a", "n": [[-{DIGITS}]]}}': "an integer has more than 4,300 digits",
    '{"prompt": ' + "[" * 100_000 + "}": "brackets are nested too deep",
    '{"a":' * 100_000: "brackets are nested too deep",
    '{"prompt": "a"': "not JSON",
    "\x00": "not JSON",
    "[NaN": "not JSON",
}


@pytest.mark.parametrize(("row", "words"), ROWS.items(), ids=lambda value: value[:25])
def test_an_invalid_row_is_named_by_its_line(tmp_path, row, words):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{row}\n{{"prompt": "b"}}\n')
    with pytest.raises(DataError, match="line 2: ") as refused:
        read_rows(str(file), "prompt")
    assert words in str(refused.value)
    with pytest.raises(RunError, match="line 2: "):
        list(read_run_rows(file))
    (tmp_path / "rows.json").write_text(f"[{row}]")
    with pytest.raises(DataError, match=r"rows\.json"):
        read_rows(str(tmp_path / "rows.json"), "prompt")
    (tmp_path / "input.json").write_text(row)
    with pytest.raises(InputError, match=r"input\.json: "):
        read_json(tmp_path / "input.json", lambda data: data, "workload", InputError)


def test_integers_of_the_maximum_length_are_accepted():
    assert parse_json("1" * 4300) == int("1" * 4300)
    with pytest.raises(yaml.YAMLError, match="4,300"):
        parse_yaml(f"a: {DIGITS}")
    with pytest.raises(ConfigError):
        read_job(__file__)


FORMULAS = [
    "=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "=HYPERLINK(1)", "-5", "+", "=", "@",
    "=1\r=2",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_is_read_as_a_formula_by_a_spreadsheet(tmp_path, text):
    rows = pd.DataFrame({"reward": [0.0, -1.5], "prompt": text, "response": text, "id": ["1/0/0", "1/0/1"]})
    rows = rows.assign(step=1, group=text, data_source=text, ground_truth=text)
    after = pd.DataFrame({"reward": [1.0, -2.5], "failure": [None, text], "traceback": None, text: [0.5, -0.5]})
    _, path = write(compare(rows, after), rows, after, tmp_path / "replay", {}, 1)
    with path.open(newline="") as file:
        table = list(csv.reader(file))
    cells = [cell for row in table for cell in row]
    assert f"'{text}" in cells and table[0].count(f"'{text}") == 1
    for cell in cells:
        assert not cell.lstrip().startswith(("=", "+", "@")) and (not cell.startswith("-") or float(cell) < 0)
    assert "-2.5" in cells and "-0.5" in cells, "numbers are not quoted"
