"""`rlfuse prepare gsm8k`: rows in verl's format, from a local copy or generated, and their scores."""

import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlfuse.cli import main
from rlfuse.data.rows import read_rows
from rlfuse.rewards.verifiers import numeric
from rlfuse.tasks import gsm8k

COPY = {
    "train": [{"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}] * 2,
    "test": [{"question": "A thousand and one?", "answer": "It is.\n#### 1,001"}],
}


@pytest.fixture(autouse=True)
def offline_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "nothing"))


def read(split):
    return read_rows(f"data/gsm8k/{split}.parquet", "prompt")


@pytest.mark.parametrize("form", ["hub", "authors"])
def test_local_copy_is_converted_to_verl_rows(form, capsys):
    os.makedirs("copy/main")
    os.makedirs("copy/socratic")
    for split, rows in COPY.items():
        if form == "hub":
            pq.write_table(pa.Table.from_pylist(rows), f"copy/main/{split}-00000-of-00001.parquet")
            pq.write_table(pa.Table.from_pylist(rows * 3), f"copy/socratic/{split}-00000-of-00001.parquet")
        else:
            with open(f"copy/{split}.jsonl", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    assert main(["prepare", "gsm8k", "--from", "copy"]) == 0
    (row,) = read("test")
    assert (row.data_source, row.ground_truth, len(read("train"))) == ("openai/gsm8k", "1001", 2)
    assert row.messages[0]["content"] == f"A thousand and one? {gsm8k.INSTRUCTION}"
    assert row.columns["extra_info"] == {"split": "test", "index": 0} | COPY["test"][0]
    assert main(["prepare", "gsm8k"]) == 0 and len(read("train")) == 2, "rows from the local copy were overwritten"
    assert "can't be reached" not in capsys.readouterr().out


def test_single_file_copy_is_split_and_reread_after_a_change():
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(20)]
    for count in (20, 10):
        pq.write_table(pa.Table.from_pylist(rows[:count]), "all.parquet")
        assert main(["prepare", "gsm8k", "--from", "all.parquet"]) == 0
        assert [row.ground_truth for row in read("test")] == ["0", "10"][: count // 10]
        assert len(read("train")) == count - count // 10


def test_sample_is_generated_without_hub_or_copy(capsys):
    assert main(["prepare", "gsm8k"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert "can't be reached" in output[0] and "256 and 64 generated problems" in output[0] and "NOT GSM8K" in output[0]
    assert output[1:3] == ["data/gsm8k/test.parquet", "data/gsm8k/train.parquet"]
    rows = [*read("train"), *read("test")]
    assert len({row.messages[0]["content"] for row in rows}) == len(rows) == 320
    for row in rows:
        answer = row.columns["extra_info"]["answer"]
        assert numeric.score(row.data_source, answer, row.ground_truth)["score"] == 1
        assert numeric.score(row.data_source, "#### -7", row.ground_truth)["score"] == 0
        for expression, value in re.findall(r"<<(.*?)=(.*?)>>", answer):
            assert eval(expression) == int(value) >= 0  # only digits and one operator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k", "--from", "nowhere"], "--from nowhere: expected files named train* and test*"),
        (
            ["gsm8k", "--from", "bad.jsonl"],
            "bad.jsonl, line 1: has columns text; expected text columns question and answer",
        ),
        (["gsm8k", "--from", "open.jsonl"], "field answer: 'four' does not end with a line such as `#### 42`"),
        (["gsm8k", "--from", "one.jsonl"], "has 1 rows; at least 2 are needed"),
        (["quickstart", "--from", "x"], "only for gsm8k and pairs"),
        (["pairs"], "--from RESPONSES is missing"),
        (["pairs", "--from", "nowhere"], "--from nowhere: no such file"),
        (["gsm8"], "unknown task; did you mean gsm8k?"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    with open("bad.jsonl", "w") as bad, open("open.jsonl", "w") as no_end, open("one.jsonl", "w") as one:
        bad.write('{"text": "x"}\n')
        no_end.write('{"question": "2+2?", "answer": "four"}\n')
        one.write('{"question": "2+2?", "answer": "#### 4"}\n')
    assert main(["prepare", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not os.path.exists("data")
