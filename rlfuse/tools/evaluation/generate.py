"""`rlfuse generate my_job.yaml [CHECKPOINT] --out responses.jsonl`: write a model's responses to prompts.

Rows are written as they finish. Rerunning the command continues an interrupted file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.files import write_lock
from rlfuse.tools.evaluation.arguments import made_from, make_parser, parse_arguments, read
from rlfuse.tools.evaluation.display import start_display
from rlfuse.tools.evaluation.responses import Responses
from rlfuse.tools.evaluation.source import Source


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises ConfigError, DataError, RewardError or EngineError."""
    arguments, words = parse_arguments(_parser(), argv)
    out: Path = arguments.out
    if out.suffix != ".jsonl" or out.is_dir():
        raise ConfigError([f"--out {out}: it must be a file name that ends in .jsonl"])
    config, source = read(words, arguments.prompts or (), arguments.score, arguments.run_code)
    with write_lock(out):
        _write(out, config, source, arguments.score)


def _write(out: Path, config: Config, source: Source, score: bool) -> None:
    display = start_display(source)
    with display.part("libraries"):
        from rlfuse.tools.evaluation.answering import answer, load
    loaded = load(config, source.step, score, display.say)
    responses = Responses(out, score)
    left = responses.begin(made_from(config, source, score), loaded.groups)
    if responses.written:
        display.say(f"{responses.written:,} of {responses.total:,} responses are already in {out}")
    if left:
        answer(loaded, left, responses, display)
    display.say(f"written  {out}")


def _parser() -> argparse.ArgumentParser:
    made = make_parser(
        "generate",
        "[options] my_job.yaml [CHECKPOINT] --out FILE [key=value ...]",
        description="Write a model's responses to a file as they finish. Sampling is set by rollout.val_kwargs.* "
        "(rollout.val_kwargs.n=4 rollout.val_kwargs.temperature=1). CHECKPOINT: same as for rlfuse eval.",
    )
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file (.jsonl)")
    made.add_argument(
        "--prompts",
        action="append",
        metavar="FILE",
        help="prompt file that replaces data.val_files, in any supported format; may be repeated",
    )
    made.add_argument("--score", action="store_true", help="score responses with the reward of the job")
    return made
