"""`rlfuse eval my_job.yaml [CHECKPOINT] [key=value ...]`: score a model on the job's held-out prompts.

Samples are identical to those of the run's validation after that step. Results are a table, and `eval.json` and
`responses.jsonl` in RUN/eval/global_step_N/ or PROJECT/eval/NAME/. Existing results are not overwritten; an interrupted
evaluation is continued.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlfuse import clock
from rlfuse.config.schema import Config
from rlfuse.errors import RewardError
from rlfuse.files import is_write_locked, write_atomically, write_lock
from rlfuse.observe.live import figure
from rlfuse.progress import Console
from rlfuse.run_folder.response_store import MIB
from rlfuse.samples import Group, RewardFailure
from rlfuse.tools.evaluation.arguments import made_from, make_parser, parse_arguments, read
from rlfuse.tools.evaluation.display import start_display
from rlfuse.tools.evaluation.neighbours import attach_nearest, stores
from rlfuse.tools.evaluation.responses import Responses
from rlfuse.tools.evaluation.scores import ACC, LENGTHS, REWARD, averaged_parts, score_name, statistics_by_source
from rlfuse.tools.evaluation.source import Source

REPORT_FILE, RESPONSES_FILE = "eval.json", "responses.jsonl"


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises ConfigError, DataError, RewardError or EngineError."""
    arguments, words = parse_arguments(_parser(), argv)
    config, source = read(words, run_code=arguments.run_code)
    settings = made_from(config, source, scored=True)
    folder = arguments.out or folder_of(source, config, settings)
    with write_lock(folder / RESPONSES_FILE):
        _evaluate(config, source, settings, folder, arguments.threshold)


def _evaluate(config: Config, source: Source, settings: dict[str, Any], folder: Path, threshold: float) -> None:
    display = start_display(source)
    with display.part("libraries"):
        from rlfuse.tools.evaluation.answering import answer, load
    began, loaded = clock.now(), load(config, source.step, scored=True, say=display.say)
    responses = Responses(folder / RESPONSES_FILE, scored=True, draft_bytes=config.rollout.draft_store_mb * MIB)
    if left := responses.begin(settings, loaded.groups):
        if config.rollout.draft_store_mb and (neighbour := attach_nearest(left, source.step, stores(source, folder))):
            display.say(f"drafts  responses in {neighbour}; they do not change the results")
        answer(loaded, left, responses, display)
    answered = [Group(g.prompt, [s for s in g.samples if s.response is not None]) for g in loaded.groups]
    answered = [group for group in answered if group.samples]
    found = statistics_by_source(answered, threshold)
    report = report_of(config, source, answered, found, threshold, clock.now() - began)
    write_atomically(folder / REPORT_FILE, json.dumps(report, indent=2))
    show(found, answered, threshold, display.console)
    display.say(f"written  {folder / REPORT_FILE}, {RESPONSES_FILE}")
    check_failures(answered, config.reward.max_failure_rate)


def _parser() -> argparse.ArgumentParser:
    made = make_parser(
        "eval",
        "[options] my_job.yaml [CHECKPOINT] [key=value ...]",
        description="Score a model on the job's held-out prompts (data.val_files), with rollout.val_kwargs.n responses "
        "per prompt. CHECKPOINT: a global_step_N folder, a run folder (newest checkpoint), a Hugging Face folder or a "
        "hub name; default: the newest checkpoint of the job's run, else model.path.",
        epilog="several responses: rollout.val_kwargs.n=8 rollout.val_kwargs.temperature=1",
    )
    made.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        metavar="SCORE",
        help="a response passes if its score is above this value (%(default)s)",
    )
    made.add_argument("--out", type=Path, metavar="FOLDER", help="output folder (RUN/eval/global_step_N)")
    return made


def folder_of(source: Source, config: Config, settings: dict[str, Any]) -> Path:
    """Return the first folder that is free, or has an unfinished evaluation with the same settings.

    Folders to which another process writes are skipped.
    """
    trainer = config.trainer
    above = source.run or Path(trainer.default_local_dir).absolute() / trainer.project_name
    names = (source.name if number == 1 else f"{source.name}-{number}" for number in itertools.count(1))
    return next(folder for name in names if _is_free(folder := above / "eval" / name, settings))


def _is_free(folder: Path, settings: dict[str, Any]) -> bool:
    begun = Responses(folder / RESPONSES_FILE, True)
    if is_write_locked(begun.path):
        return False
    return not folder.exists() or (not (folder / REPORT_FILE).exists() and not begun.differs(settings))


def report_of(
    config: Config,
    source: Source,
    groups: Sequence[Group],
    found: dict[str, dict[str, Any]],
    threshold: float,
    seconds: float,
) -> dict[str, Any]:
    """Return the content of `eval.json`; `metrics` are those of a validation, under the same names."""
    from rlfuse.observe.metrics import validation_metrics
    from rlfuse.observe.summary import versions

    return {
        "made_from": made_from(config, source, scored=True),
        "run": str(source.run) if source.run else None,
        "passed": f"{score_name(groups)} above {threshold:g}",
        "by_data_source": found,
        "metrics": {name: value if value == value else None for name, value in validation_metrics(groups).items()},
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": round(seconds, 1),
        "versions": versions(),
    }


def show(found: dict[str, dict[str, Any]], groups: Sequence[Group], threshold: float, console: Console) -> None:
    """Print tables of scores, pass@k (for several responses per prompt) and lengths in tokens."""
    name, several = score_name(groups), averaged_parts(groups)
    k_values = sorted({k for figures in found.values() for k in figures["pass@k"]})
    most = max(k_values, default=1)
    scores = _table("responses", *([ACC, *several] if name != REWARD else []), REWARD, "pass@1")
    passes, lengths = (
        _table(*(f"pass@{k}" for k in k_values), f"best@{most}", f"maj@{most}"),
        _table("mean tokens", "median", "p95", "max", "truncated"),
    )
    for source, figures in found.items():
        each = round(figures["samples"] / figures["prompts"])
        spread = "" if figures["stderr"] is None else f" ±{figures['stderr']:.3f}"
        means = [figure(figures["score"]) + spread, *(figure(figures["parts"].get(part)) for part in several)]
        means += [figure(figures["reward"])] if name != REWARD else []
        of_k = [figure(figures["pass@k"].get(k)) for k in k_values]
        scores.add_row(Text(source), f"{figures['prompts']:,} x {each}", *means, *(of_k[:1] or ["-"]))
        passes.add_row(Text(source), *of_k, figure(figures["best@n"]), figure(figures["maj@n"]))
        length, cut = figures["length"], figures["finish"].get("length", 0) / figures["samples"]
        lengths.add_row(Text(source), *(f"{length[key]:,.0f}" for key in LENGTHS), f"{cut:.1%}")
    console.print(scores, *([passes] if len(k_values) > 1 else []), lengths)
    note = f"pass@k: a response passes if its {name} is above {threshold:g}. ±: standard error over prompts."
    if most > 1:
        note += f" best@{most}, maj@{most}: {name} of the best and of the majority answer of {most} responses, drawn "
        note += "with replacement as in verl."
    console.print(note, markup=False, soft_wrap=True)
    coverage = list(found.values())[-1]["coverage"]
    if partial := [f"{part} {share:.1%}" for part, share in coverage.items() if share < 1]:
        note = f"Responses with this part (a missing part counts as 0): {', '.join(partial)}."
        console.print(note, markup=False, soft_wrap=True)
    failures = [s.reward for group in groups for s in group.samples if isinstance(s.reward, RewardFailure)]
    if failures:
        first = f"{failures[0].function}: {failures[0].message}"
        note = f"{len(failures)} responses have no reward and are excluded from scores. First failure: {first}"
        console.print(note, markup=False, soft_wrap=True)


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("data_source", overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def check_failures(groups: Sequence[Group], max_rate: float) -> None:
    """Raise RewardError if the share of responses without a reward exceeds `max_rate`."""
    rewards = [sample.reward for group in groups for sample in group.samples]
    failed = sum(isinstance(reward, RewardFailure) for reward in rewards)
    if failed > max_rate * len(rewards):
        raise RewardError(
            f"{failed} of {len(rewards)} responses have no reward, above reward.max_failure_rate={max_rate}; scores "
            "exclude them. Fix the reward function, or raise the rate."
        )
