"""`rlfuse.train`, `start`, `evaluate`, `generate`, `plan`: the commands of these names, with Python objects.

Arguments become the words of the command (`words`, `inputs`, `functions`), so both compose, check and run the same job.
Invalid settings are reported before a process starts. Jobs run in a separate process (`jobs`), a plan in this one.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfuse.api.functions import reward_entries
from rlfuse.api.inputs import data_file, job_file
from rlfuse.api.jobs import Job
from rlfuse.api.results import Evaluation, Plan, Run, read_responses
from rlfuse.api.words import setting_words, split_presets
from rlfuse.config.compose import load
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError, RunError
from rlfuse.run.resume.acceptance import NothingToDo, accept

if TYPE_CHECKING:
    import pandas as pd

Source = str | os.PathLike[str] | Config | None
Model = str | os.PathLike[str] | Run | Mapping[str, Any] | None
PYTHON = [sys.executable, "-P", "-m"]
MODES = ("-m", "--multirun", "-c", "--cfg", "-i", "--info", "-h", "--help")
"""Options of the command line that do not run one job."""
MAX_SHOWN = 60
_COMPOSING = threading.Lock()
"""Hydra composes one job at a time, because its state is global."""


def train(
    job: Source = None,
    *overrides: str,
    model: Model = None,
    reward: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    timeout_s: float | None = None,
    show: Callable[[str], object] = print,
    **settings: Any,
) -> Run:
    """Train, and return the run. It runs in a separate process; Ctrl-C, or an interrupt of the cell, stops it with a
    checkpoint, and the same call resumes it.

    `job`: a job file, a `Config`, or an override such as `experiment=quickstart`; `overrides`: as on the command line.
    `model`: folder or hub name, a run (its newest checkpoint), or a dict of keys of this group.
    `reward`: a function in a signature of verl, TRL or OpenRLHF, `path/file.py:function`, an entry of reward.functions,
    a list of these, or a dict of keys of this group.
    `dataset`, `eval_dataset`: data.train_files and data.val_files: a list of rows, a `datasets.Dataset`, a pandas
    table, or a file.
    `timeout_s`: the job is stopped after this time. `show`: receives each line of output.
    `settings`: other groups, as in trainer={"total_training_steps": 20}, or presets, as in algorithm="grpo".

    Raises the error of the job: ConfigError, DataError, RewardError, EngineError, ..., or JobError.
    """
    job_process = start(
        job, *overrides, model=model, reward=reward, dataset=dataset, eval_dataset=eval_dataset, **settings
    )
    return job_process.follow(timeout_s, show)


def start(
    job: Source = None,
    *overrides: str,
    model: Model = None,
    reward: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    **settings: Any,
) -> Job[Run]:
    """Start a job with the arguments of `train`, and return it at once."""
    words = _words(job, overrides, model, reward, {"train": dataset, "val": eval_dataset}, settings)
    with _checking():
        config = load(words)
    try:
        folder = accept(config).config.run_folder
    except NothingToDo as end:  # the job reports it
        folder = end.folder
    # A name from the current time would differ in the process of the job.
    named = setting_words({"trainer.experiment_name": folder.name})
    return Job(folder, [*PYTHON, "rlfuse.train", *words, *named], partial(Run, is_trusted=True))


def evaluate(
    job: Source | Run = None,
    *overrides: str,
    model: str | os.PathLike[str] | None = None,
    reward: Any = None,
    dataset: Any = None,
    threshold: float = 0.5,
    run_code: bool = False,
    timeout_s: float | None = None,
    show: Callable[[str], object] = print,
    **settings: Any,
) -> Evaluation:
    """Score a model on held-out prompts, as `rlfuse eval`, and return the scores and responses.

    `job`: as for `train`, or a run with its configuration. `model`: a run, a checkpoint, a model folder or a hub name;
    by default the newest checkpoint of the job's run. `dataset` replaces data.val_files. A response passes if its
    score is above `threshold`. `run_code`: permit the code that the configuration of a run names; not needed for runs
    that `train` returned.
    """
    from rlfuse.tools.evaluation.arguments import made_from, read
    from rlfuse.tools.evaluation.evaluate import folder_of

    words = _evaluation_words(job, overrides, model, reward, {"val": dataset}, settings)
    run_code = run_code or _is_trusted(job, model)
    with _checking():
        config, source = read(words, run_code=run_code)
    folder = folder_of(source, config, made_from(config, source, scored=True))
    options = ["--out", str(folder), "--threshold", str(threshold), *(["--run-code"] if run_code else [])]
    return Job(folder, [*PYTHON, "rlfuse.cli", "eval", *options, *words], Evaluation).follow(timeout_s, show)


def generate(
    job: Source | Run = None,
    *overrides: str,
    prompts: Any = None,
    model: str | os.PathLike[str] | None = None,
    reward: Any = None,
    out: str | os.PathLike[str] | None = None,
    run_code: bool = False,
    timeout_s: float | None = None,
    show: Callable[[str], object] = print,
    **settings: Any,
) -> pd.DataFrame:
    """Generate responses, as `rlfuse generate`, and return a table with a row each; see `evaluate`.

    `prompts`: a list of texts or of lists of messages, or as `dataset` of `train`; by default data.val_files. `reward`:
    also score them. `out`: file (.jsonl) to keep the responses in; an interrupted file is continued.
    """
    from rlfuse.tools.evaluation.arguments import read

    words = _evaluation_words(job, overrides, model, reward, {}, settings)
    run_code, files = run_code or _is_trusted(job, model), [] if prompts is None else [data_file(prompts, "prompts")]
    with _checking():
        read(words, files, scored=reward is not None, run_code=run_code)
    options = [word for file in files for word in ("--prompts", file)]
    options += [*(["--score"] if reward is not None else []), *(["--run-code"] if run_code else [])]
    with tempfile.TemporaryDirectory(prefix="rlfuse-generate-") as folder:
        file = Path(folder) / "responses.jsonl" if out is None else Path(out)
        command = [*PYTHON, "rlfuse.cli", "generate", "--out", str(file), *options, *words]
        return Job(file, command, read_responses).follow(timeout_s, show)


def plan(
    job: Source = None,
    *overrides: str,
    model: Model = None,
    reward: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    device_memory: float | None = None,
    peak_tflops: float | None = None,
    cluster_file: str | os.PathLike[str] | None = None,
    costs_from: str | os.PathLike[str] | Run | None = None,
    prompt_tokens: int | None = None,
    response_tokens: float | None = None,
    **settings: Any,
) -> Plan:
    """Predict memory, placement and step time of a job, as `rlfuse plan`; needs no GPU.

    Arguments as for `train`. `device_memory`: GiB per GPU. `peak_tflops` (of a device), `cluster_file` or `costs_from`
    (a recorded run) give the costs for a forecast of step time. `prompt_tokens`, `response_tokens`: mean lengths.
    """
    from rlfuse.tools.planning.plan import main
    from rlfuse.tools.planning.search_command import DOES_NOT_FIT

    options = {
        "--device-memory": device_memory,
        "--peak-tflops": peak_tflops,
        "--cluster": cluster_file,
        "--from": costs_from,
        "--prompt-tokens": prompt_tokens,
        "--response-tokens": response_tokens,
    }
    given = [word for option, value in options.items() if value is not None for word in (option, f"{value}")]
    words = _words(job, overrides, model, reward, {"train": dataset, "val": eval_dataset}, settings)
    text, notes, fits = io.StringIO(), io.StringIO(), True
    with _COMPOSING, redirect_stdout(text), redirect_stderr(notes):
        try:
            main([*given, *words])
        except SystemExit as end:
            if end.code != DOES_NOT_FIT:
                raise ConfigError([notes.getvalue().strip().rpartition("\n")[2]]) from None
            fits = False
    sys.stderr.write(notes.getvalue())
    return Plan(fits, text.getvalue())


@contextmanager
def _checking() -> Iterator[None]:
    """Omit the notes about a job while it is checked: its process prints them."""
    with _COMPOSING, redirect_stderr(io.StringIO()):
        yield


def _words(
    job: Source,
    overrides: Sequence[str],
    model: Model,
    reward: Any,
    data: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[str]:
    """Return the words of the command line with the same job. `data`: rows of data.{name}_files by name."""
    if isinstance(job, Config):
        presets, overrides, settings = split_presets([_word(each) for each in overrides], settings)
        job = job_file(job, presets)
    words = [_word(each) for each in (*([] if job is None else [job]), *overrides)]
    if isinstance(model, Run):
        model = _checkpoint_model(model)
    if model is not None:
        words += setting_words({"model": model if isinstance(model, Mapping) else {"path": model}})
    if reward is not None:
        group = reward if isinstance(reward, Mapping) and "path" not in reward else {"functions": reward}
        functions = {"functions": reward_entries(group["functions"])} if "functions" in group else {}
        words += setting_words({"reward": {**group, **functions}})
    files = {f"{name}_files": [data_file(rows, name)] for name, rows in data.items() if rows is not None}
    return [*words, *setting_words({"data": files}), *setting_words(settings)]


def _word(given: Any) -> str:
    """Return a job file or an override as a word of the command line. Raises ConfigError for anything else."""
    valid = "pass a job file or a rlfuse.Config first, overrides such as 'rollout.n=8', and dicts by keyword"
    if isinstance(given, Run) or not isinstance(given, str | os.PathLike):
        raise ConfigError([f"{str(given)[:MAX_SHOWN]}: is a {type(given).__name__}; {valid}"])
    word = os.fspath(given)
    if word.partition("=")[0] in MODES:
        raise ConfigError([f"{word}: is an option of the command line; {valid}, and call the function once per job"])
    return word


def _evaluation_words(
    job: Source | Run,
    overrides: Sequence[str],
    model: str | os.PathLike[str] | None,
    reward: Any,
    data: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[str]:
    """Return the words of an evaluation: the job, and the model as the word CHECKPOINT."""
    if isinstance(job, Run):
        if model is not None:
            raise ConfigError([f"model={os.fspath(model)}: the run {job.folder} is evaluated; pass either of them"])
        job, model = None, job
    checkpoint = [] if model is None else [os.fspath(model)]
    return [*checkpoint, *_words(job, overrides, None, reward, data, settings)]


def _is_trusted(*given: Any) -> bool:
    return any(isinstance(each, Run) and each.is_trusted for each in given)


def _checkpoint_model(run: Run) -> Path:
    if run.model is None:
        raise RunError(f"model: {run.folder} has no checkpoint; train it with trainer.save_freq above 0")
    return run.model
