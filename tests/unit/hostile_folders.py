"""Ten malicious job files and ten malicious run folders."""

import json
import os
import socket
from pathlib import Path

import yaml

RUN = Path(__file__).parents[2] / "notebooks" / "data" / "run"
STARTS = {"events.jsonl": 90, "metrics.jsonl": 3, "samples.jsonl": 32}
DEEP = '{"a":' * 50_000
DIGITS = "9" * 6000
SCRIPT = "</script><script>fetch('//evil.example/')</script><img src=x onerror=alert(1)>"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m[link=file:///etc/passwd]x[/link]\r\u202e"

JOBS = {
    "interpolations that double": "\n".join(
        [f"trainer: {{experiment_name: '{'${rollout.engine_kwargs.a0}' * 2}'}}", "rollout:", "  engine_kwargs:"]
        + [f"    a{n}: '{f'${{rollout.engine_kwargs.a{n + 1}}}' * 10}'" for n in range(12)]
        + ["    a12: 'xxxxxxxxxx'"]
    ),
    "an interpolation of itself": "trainer: {project_name: '${trainer.experiment_name}', "
    "experiment_name: '${trainer.project_name}'}",
    "a target of Hydra": "reward: {functions: [{path: 'x.py:f', kwargs: {_target_: os.system, "
    "_args_: ['touch {marker}']}}]}",
    "a launcher and a search path": "hydra: {searchpath: ['file://{folder}'], launcher: {_target_: os.system}, "
    "callbacks: {a: {_target_: os.system, command: 'touch {marker}'}}}",
    "resolvers": "trainer: {project_name: '${oc.decode:\"${oc.env:HOME}\"}', experiment_name: "
    "'${hydra:runtime.cwd}/${oc.create:{a: 1}}'}",
    "hundred thousand keys": "\n".join(f"trainre.save_frq{n}: {n}" for n in range(100_000)),
    "a key of a megabyte": f"{'rollout.' * 130_000}n: 1",
    "not text": "\ufeff\u2028trainer: \x85{nnodes: 1}",
    "names of folders": "trainer: {project_name: '../../../outside', experiment_name: '/{marker}', "
    f"default_local_dir: {json.dumps('~root/' + ESCAPES)}}}",
    "sizes without end": "trainer: {nnodes: 1000000000, n_gpus_per_node: 1000000000}\n"
    "rollout: {n: 1000000000}\ndata: {train_batch_size: 1000000000, max_prompt_length: 1000000000}",
}


def _append(file: str, *lines: str):
    def change(folder: Path) -> None:
        with (folder / file).open("a") as opened:
            opened.writelines(f"{line}\n" for line in lines)

    return change


def _write(**files: str):
    def change(folder: Path) -> None:
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return change


def _configured(**groups: dict):
    def change(folder: Path) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        for group, values in groups.items():
            config[group] = values if not isinstance(values, dict) else config[group] | values
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    return change


def _status(**values):
    given = {
        "state": "finished",
        "name": "p/n",
        "command": "",
        "commit": "",
        "sweep": "",
        "host": socket.gethostname(),
        "pid": 1,
    }
    return _write(status__json=json.dumps(given | {"started": 0.0} | values))


def _all(*changes):
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def _edited(file: str, number: int, **values):
    """Return a change of values in one row of a file."""

    def change(folder: Path) -> None:
        lines = (folder / file).read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | values)
        (folder / file).write_text("\n".join(lines) + "\n")

    return change


def _checkpoints(folder: Path) -> None:
    for name, state in {"7": "[]", "8": '{"step": "eight"}', DIGITS[:80]: "{}", "-1": DEEP, "9": DIGITS}.items():
        checkpoint = folder / f"global_step_{name}"
        checkpoint.mkdir()
        (checkpoint / "run.json").write_text(state)
        (checkpoint / "COMPLETE").touch()
    (folder / "global_step_99").symlink_to(folder.parent / "outside")
    (folder / "latest_checkpointed_iteration.txt").write_text(DIGITS)


def _links(folder: Path) -> None:
    os.mkfifo(folder / "inputs.jsonl")
    for name in ("summary.json", "changes.jsonl", "alerts.jsonl"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "outside" / "secret")


FOLDERS = {
    "rows that are no rows": _all(_status(), _append("metrics.jsonl", "[1]", '"step"', "null", '{"step": "x"}', "{}")),
    "numbers beyond numbers": _all(
        _status(started=1e300, total=10**30, ended=-1e300),
        _append("metrics.jsonl", '{"step": 1e400, "critic/score/mean": NaN}', f'{{"step": {DIGITS}}}'),
    ),
    "brackets without end": _all(
        _status(), _write(live__json=DEEP, summary__json=DEEP, changes__jsonl=DEEP, alerts__jsonl=DEEP)
    ),
    "a status of other kinds": _all(
        _status(state={"a": 1}, name=[1], host=7, started="yesterday", total="many", error={"a": []}),
        _write(summary__json='{"reward_first": "x", "label": [1], "seconds": {}}'),
    ),
    "a running run that was never here": _all(
        _status(state="running", name=SCRIPT, sweep=ESCAPES),
        _write(live__json=json.dumps({"at": "x", "view": {"stages": 7}})),
    ),
    "texts for a page and a terminal": _all(
        _status(name=ESCAPES, error=SCRIPT, state="failed", command=SCRIPT),
        _configured(trainer={"experiment_name": SCRIPT, "project_name": ESCAPES}),
        _edited("samples.jsonl", 3, prompt=SCRIPT, response=ESCAPES, data_source=SCRIPT, id=ESCAPES),
    ),
    "slots and steps without end": _all(
        _status(),
        _configured(trainer={"nnodes": 10**9, "n_gpus_per_node": 10**9, "total_training_steps": 10**15}),
        _edited("metrics.jsonl", -1, step=10**15),
    ),
    "events out of time": _all(
        _status(),
        _edited("events.jsonl", 5, start=1e300, end=-1e300, step=10**15),
        _edited("events.jsonl", 6, where=SCRIPT, kind=ESCAPES, start="now"),
        _write(changes__jsonl='{"step": 1, "key": "trainer.nnodes.a.b", "was": 1}\n{"step": "x", "key": 7}\n'),
    ),
    "checkpoints that are none": _all(_status(state="stopped"), _checkpoints),
    "links out of the folder": _all(
        _status(state="stopped"), _links, _edited("samples.jsonl", 0, sheet="../outside/secret", clips=["/etc/passwd"])
    ),
}


def run_folder(parent: Path, name: str) -> Path:
    folder = parent / "run"
    folder.mkdir()
    for file in RUN.iterdir():  # only the first step, to keep reading fast
        lines = file.read_text().splitlines(keepends=True)
        (folder / file.name).write_text("".join(lines[: STARTS.get(file.name)]))
    FOLDERS[name](folder)
    for file in folder.glob("*.json*"):  # old modification times, so that the run does not count as running
        os.utime(file, (1e9, 1e9), follow_symlinks=False)
    return folder
