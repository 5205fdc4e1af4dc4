"""`rlfuse schedule` as a user types it: a file in; a summary, a schedule, a picture out; one line for what is wrong."""

import json

import pytest
from published_schedules import problem

from rlfuse.cli import main
from rlfuse.fusion.schedules.schedule import Schedule, check, read_schedule


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLFUSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem(5).as_json()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "html"])
def test_summary_schedule_and_picture(path, tmp_path, capsys, ending, monkeypatch):
    made, as_json = [], Schedule.as_json
    monkeypatch.setattr(Schedule, "as_json", lambda schedule: made.append(schedule) or as_json(schedule))
    out, picture = tmp_path / "schedule.json", tmp_path / f"picture.{ending}"
    assert main(["schedule", str(path), "--out", str(out), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "makespan   225, 0.00% above the bound of 225" in printed
    assert "1F1B 315: 1.400x; ZB-V without a barrier" in printed
    schedule = read_schedule(out)
    check(problem(5), schedule)
    assert len(made) <= 1, "one text for --out and the cache"
    assert json.loads(out.read_text()).keys() == {
        "makespan",
        "lower_bound",
        "serial_1f1b",
        "memory_peak",
        "seconds",
        "method",
        "rows",
    }
    start = picture.read_bytes()[:15].lower()
    assert start.startswith(b"\x89png") or start == b"<!doctype html>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "no/such/folder/x.json"], "does not exist; make it first"),
        (["--out", "OUT", "--picture", "x.pdf"], "needs a name that ends in .png or .html"),
        (["--out", "OUT", "--method", "magic"], "method=magic: needs one of auto, list"),
        (["--out", "OUT", "--time-limit", "0"], "time_limit=0: needs a number of seconds above 0"),
        (
            ["--out", "OUT", "--time-limit", "inf"],
            "time_limit=inf: needs a number of seconds above 0, at most 1,000,000",
        ),
        (["--out", "OUT", "--seed", "-1"], "seed=-1: needs a whole number from 0 to 1,000,000"),
    ],
)
def test_mistakes_are_one_line_and_status_2(path, tmp_path, capsys, arguments, message):
    arguments = [str(tmp_path / "out.json") if word == "OUT" else word for word in arguments]
    assert main(["schedule", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_wrong_problem_is_named_with_its_file(path, tmp_path, capsys):
    path.write_text(json.dumps(problem(5).as_json() | {"devices": 3}))
    assert main(["schedule", str(path), "--out", str(tmp_path / "out.json")]) == 2
    assert f"{path}:1: models[0]: pipelines=1 of stages=8" in capsys.readouterr().err
