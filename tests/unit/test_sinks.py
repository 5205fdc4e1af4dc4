"""The wandb logger: its files are read back."""

import json
import signal
import struct
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image
from test_observe import sample

from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.observe import wandb_sink
from rlfuse.observe.sink import VALIDATION
from rlfuse.observe.tracking import FAILURE_FIELDS, StepFile, sample_row
from rlfuse.observe.wandb_sink import Wandb
from rlfuse.samples import Reward

FAILED = [dict.fromkeys(FAILURE_FIELDS, "x")]


def records(path):
    """Read the records of a .wandb file: LevelDB's log format in blocks of 32 KiB, after a header of wandb."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, found, record = path.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):
            break  # an incomplete record at the end
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only or last fragment
            found.append(Record.FromString(record))
            record = b""
    return found


def history(path):
    """Return a dict of name -> JSON value for each row."""
    rows = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: item.value_json for item in row} for row in rows]


def wait_for(condition):
    """Wait until `condition` is true."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_wandb_has_all_rows_and_a_resumed_run_continues(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_GROUP", "a sweep")
    config, rows = Config(), []
    for start in (0, 1):
        sink = Wandb(config, {}, tmp_path, start)
        for step in (start + 1, start + 2):
            for _ in range(2):
                sink.reward_failures(step, FAILED)
            sink.log(step, {"critic/score/mean": step / 2})
        sink.close(0)
        (path,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - {path for path, _ in rows}
        wait_for(lambda path=path: len(history(path)) >= 6)
        rows.append((path, history(path)))
    steps = [row["training/global_step"] for _, found in rows for row in found]
    assert steps == ["1", "1", "1", "2", "2", "2", "2", "2", "2", "3", "3", "3"]
    scores = [row["critic/score/mean"] for _, found in rows for row in found if "critic/score/mean" in row]
    assert scores == ["0.5", "1", "1", "1.5"]
    assert sum("reward_failures" in row for _, found in rows for row in found) == 8
    numbers = [int(row["_step"]) for _, found in rows for row in found]
    assert numbers == sorted({*numbers}), "no row replaces another when both folders are uploaded"
    first, second = (records(path) for path, _ in rows)
    (axis,) = (record.metric for record in first if record.WhichOneof("record_type") == "metric")
    assert (axis.glob_name, axis.step_metric) == ("*", "training/global_step")
    runs = [
        next(record.run for record in each if record.WhichOneof("record_type") == "run") for each in (first, second)
    ]
    assert runs[0].run_id == runs[1].run_id and runs[0].run_group == "a sweep"


def terminate_wandb():
    """Send SIGTERM to the process of wandb, as a scheduler does to all processes of a job."""
    cores = [each for each in psutil.Process().children(recursive=True) if each.name() == "wandb-core"]
    for core in (running := [each for each in cores if each.status() != psutil.STATUS_ZOMBIE]):
        core.send_signal(signal.SIGTERM)
    assert running
    while any(core.is_running() and core.status() != psutil.STATUS_ZOMBIE for core in running):
        time.sleep(0.01)


@pytest.mark.slow
def test_sample_tables_have_ground_truths_and_contact_sheets(tmp_path):
    Image.new("RGB", (4, 2)).save(tmp_path / "sheet.png")
    reward = Reward(0.5, {"exact": 1.0, "reward": 0.25})
    rows = [sample_row(sample(index, 0, 3, reward), sheet) for index, sheet in enumerate(("sheet.png", None))]
    sink = Wandb(Config(), {}, tmp_path, 0)
    sink.samples(1, rows)
    sink.samples(1, rows[1:], VALIDATION)
    sink.close(0)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_for(lambda: any(record.WhichOneof("record_type") == "exit" for record in records(path)))
    tables, files = {}, {}
    for artifact in (each.artifact for each in records(path) if each.WhichOneof("record_type") == "artifact"):
        assert artifact.type == "run_table"
        for each in artifact.manifest.contents:  # uploaded by `wandb sync`
            assert each.local_path.startswith(f"{tmp_path}/wandb/"), "the run folder contains all files"
            files[each.path] = Path(each.local_path).read_bytes()
            if each.path.endswith(".json"):
                tables[each.path] = json.loads(files[each.path])
    trained, validated = tables["samples.table.json"], tables["val/generations.table.json"]
    columns = ["step", "id", "prompt", "response", "ground_truth", "finish", "response_tokens", "reward"]
    columns += ["exact", "rewards/reward"]
    assert trained["columns"] == [*columns, "clip"] and validated["columns"] == columns
    (*values, sheet), (*others, nothing) = trained["data"]
    assert values == [1, "1/0/0", "p", "r", "1", "stop", 3, 0.5, 1.0, 0.25] and others == [1, "1/1/0", *values[2:]]
    assert files[sheet["path"]] == (tmp_path / "sheet.png").read_bytes() and nothing is None
    assert validated["data"] == [others]


@pytest.mark.slow
def test_steps_lost_with_the_process_of_wandb_are_logged_again(tmp_path):
    metrics = StepFile(tmp_path / "metrics.jsonl", -1)

    def log(sink, step):
        row = {"critic/score/mean": step / 2} | ({"training/global_step": step} if step else {})
        metrics.write(step, row)
        if sink:
            sink.log(step, row)

    def steps():
        """Return the steps of the scalars in each file of wandb."""
        paths = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        return [[int(row["training/global_step"]) for row in history(path) if "critic/score/mean" in row]
                for path in paths]  # fmt: skip

    config = Config()
    config.trainer.wandb_tags, config.trainer.wandb_group = ["a", "b"], "mine"
    sink = Wandb(config, {}, tmp_path, 0)
    for step in range(3):
        log(sink, step)
    wait_for(lambda: steps() == [[0, 1, 2]])
    for step in (3, 4):
        log(sink, step)  # buffered in the process of wandb
    terminate_wandb()
    log(sink, 5)
    sink.reward_failures(5, FAILED)
    log(sink, 6)
    terminate_wandb()
    sink.close(0)
    wait_for(lambda: sorted(step for part in steps() for step in part) == [0, 1, 2, 3, 4, 5, 6])
    parts = steps()
    assert len(parts) == 3
    newest = max(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    content = newest.read_bytes()
    newest.write_bytes(content + b"sum!\x08\0\1\xffdamaged")
    for step in (7, 8, 9):  # by a killed process, after the checkpoint of the resume
        log(None, step)
    sink = Wandb(config, {}, tmp_path, 8)
    newest.write_bytes(content)
    sink.log(9, {"critic/score/mean": 4.5})
    sink.close(0)
    wait_for(lambda: steps() == [*parts, [7, 8, 9]])
    numbers = [int(row["_step"]) for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")) for row in
               history(path)]  # fmt: skip
    assert numbers == sorted({*numbers})
    (run,) = {
        (record.run.run_id, record.run.run_group, tuple(record.run.tags))
        for path in tmp_path.glob("wandb/offline-run-*/*.wandb")
        for record in records(path)
        if record.WhichOneof("record_type") == "run"
    }
    assert run[1:] == ("mine", ("a", "b"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"WANDB_API_KEY": "short"}, "API key must have 40+ characters"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, "wandb could not start a run"),
    ],
    ids=str,
)
def test_a_wandb_that_cannot_start_gives_one_message(variables, reason, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb_sink, "INIT_S", 3.0)
    config = Config()
    config.trainer.wandb_mode, config.trainer.experiment_name = "online", "a"
    with pytest.raises(ConfigError) as error:
        Wandb(config, {}, tmp_path, 0)
    [problem] = error.value.problems
    assert problem.startswith("trainer.wandb_mode=online: ") and reason in problem and "offline" in problem
