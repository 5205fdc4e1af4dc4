"""`rlfuse push RUN_DIR USER/NAME|FOLDER`: upload a checkpoint's model to the Hugging Face hub, or copy it to a folder.

Both include the tokenizer and a model card, which names files and rewards, without local folders and secrets.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlfuse.config.facts import is_hub_name
from rlfuse.config.rewards import read_entries
from rlfuse.config.secrets import hidden, hidden_text
from rlfuse.errors import UserError
from rlfuse.observe.summary import SCORE, compared_steps, versions
from rlfuse.observe.tracking import last_validation, read_metrics
from rlfuse.run_folder.reader import RunFolder, open_run
from rlfuse.tools.evaluation.source import Source, find

CARD = "README.md"
VALIDATED = "val-core/"


class PushError(UserError):
    """The model cannot be uploaded. The message has the reason and the remedy."""


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises PushError or ConfigError."""
    arguments = _parser().parse_args(argv)
    source = find(arguments.source, None, "")
    folder = Path(source.path)
    if not folder.is_dir():
        raise PushError(
            f"{arguments.source}: the folder does not exist; use a run folder or one of its global_step_N folders"
        )
    card = card_of(source, arguments.name)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    print(f"model  {source}: {len(files)} files, {size / 2**20:,.1f} MiB")
    if arguments.dry_run:
        for path in files:
            print(f"  {path.stat().st_size / 2**20:10,.2f} MiB  {path.relative_to(folder)}")
        print(f"  {CARD}:\n\n{card}")
        return
    if (target := _folder(arguments)) is not None:
        write(folder, target, card)
        print(f"wrote  {target}")
        return
    with _translate_hub_errors(arguments.name):
        url = upload(folder, arguments.name, card, arguments.private, arguments.revision)
    print(f"pushed  {url}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlfuse push",
        description="Upload a checkpoint's model, with tokenizer and model card, to the Hugging Face hub, or "
        "copy it to a folder.",
    )
    parser.add_argument("source", metavar="RUN_DIR", help="run folder (newest checkpoint) or global_step_N folder")
    parser.add_argument(
        "name",
        metavar="USER/NAME|FOLDER",
        help="repository, created if it does not exist; or a new folder as ./PATH, ~/PATH or /PATH",
    )
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--revision", metavar="BRANCH", help="created if it does not exist (main)")
    parser.add_argument("--dry-run", action="store_true", help="print the files and the model card without uploading")
    return parser


def _folder(arguments: argparse.Namespace) -> Path | None:
    """Return the folder to write to, or None for a repository of the hub."""
    if not arguments.name.startswith((".", "/", "~")):
        return None
    if arguments.private or arguments.revision is not None:
        option = "--private" if arguments.private else f"--revision {arguments.revision}"
        raise PushError(
            f"{option}: is for repositories of the hub, but {arguments.name} is a folder; remove the option"
        )
    return Path(arguments.name).expanduser().absolute()


def write(folder: Path, target: Path, card: str) -> None:
    """Copy the model folder to `target`, with the model card unless it has one. Raises PushError if `target` exists."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PushError(f"{target}: exists and is not an empty folder; give the path of a new folder")
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copytree(folder, aside)
        if not (aside / CARD).exists():
            (aside / CARD).write_text(card)
        aside.rename(target)
    except OSError as error:
        raise PushError(f"{target}: can't be written ({error}); free disk space or give another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def upload(folder: Path, name: str, card: str, private: bool, revision: str | None) -> str:
    """Upload the folder, and the model card unless the repository has one. Return the repository URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    url = api.create_repo(name, private=private or None, exist_ok=True)
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message="Upload model by rlfuse push")
    if api.file_exists(name, CARD, revision=revision):
        print(f"  kept the existing {CARD} of the repository")
    else:
        what = {"path_or_fileobj": card.encode(), "path_in_repo": CARD, "commit_message": "Model card by rlfuse push"}
        api.upload_file(repo_id=name, revision=revision, **what)
    return str(url)


@contextmanager
def _translate_hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    if constants.HF_HUB_OFFLINE:
        raise PushError("HF_HUB_OFFLINE=1 is set, so the hub can't be used; unset it to push")
    if get_token() is None:
        raise PushError(
            "no Hugging Face token found; run `hf auth login`, or set HF_TOKEN to a token with write access"
        )
    try:
        yield
    except HFValidationError as error:
        raise PushError(
            f"{name}: {str(error).splitlines()[0]}; use the form USER/NAME, or ./PATH for a folder"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        why = hidden_text(str(error.server_message or error).strip().splitlines()[0])
        hint = "; check that the token is valid and has write access" if status in (401, 403, 404) else ""
        raise PushError(f"{name}: the hub refused ({status}): {why}{hint}") from error
    except (HTTPError, ConnectionError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PushError(f"{constants.ENDPOINT} can't be reached ({why}); check the network and HF_ENDPOINT") from error


def card_of(source: Source, name: str) -> str:
    """Return the model card: base model, data, steps, algorithm, reward and results."""
    from huggingface_hub import ModelCardData

    run = open_run(source.run) if source.run and (source.run / "config.yaml").is_file() else None
    facts = _facts(run, source.step) if run else {}
    base = run.config["model"]["path"] if run else None
    kind = "text-generation" if source.answers else "text-classification"
    tags = ["rlfuse", "reinforcement-learning", *([facts["Algorithm"]] if "Algorithm" in facts else [])]
    data = ModelCardData(
        library_name="transformers",
        base_model=base if base and is_hub_name(base) else None,
        pipeline_tag=kind,
        tags=tags if source.answers else ["rlfuse", "reward-model"],
    )
    lines = ["---", data.to_yaml(), "---", "", f"# {name.rstrip('/').rpartition('/')[2]}", ""]
    lines += ["Trained with rlfuse." if run else "Uploaded with rlfuse."]
    if facts:
        lines += ["", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
    lines += [
        "",
        "```python",
        "from transformers import pipeline",
        "",
        f'model = pipeline("{kind}", "{name}")',
        "```",
        "",
    ]
    return "\n".join(lines)


def _facts(run: RunFolder, step: int) -> dict[str, str]:
    phases = run.phases(step)
    config = hidden(phases[-1][1])
    rows = [row for row in read_metrics(run.path / "metrics.jsonl") if row["step"] <= step]
    data, rewards = config.get("data", {}), config.get("reward", {})
    entries, _ = read_entries(rewards.get("functions", []), rewards.get("weights", []), rewards.get("model_path"))
    found: dict[str, Any] = {
        "Base model": Path(config["model"]["path"]).name if os.path.isabs(config["model"]["path"]) else
        config["model"]["path"],
        "Data": ", ".join("/".join(Path(file).parts[-2:]) for file in data.get("train_files", [])),
        "Steps": _batches(phases, step),
    }  # fmt: skip
    if config.get("trainer", {}).get("task", "rl") == "rl":
        found["Algorithm"] = str(config.get("algorithm", {}).get("adv_estimator")).rpartition(":")[2]
        found["Reward"] = ", ".join(entry.name or re.split("[:/]", entry.path)[-1] for entry in entries)
        scores = [row[SCORE] for row in rows if SCORE in row]
        window = compared_steps(len(scores))
        found["Mean reward"] = f"{_mean(scores[:window])} → {_mean(scores[-window:])}" if scores else None
    for name in (name for name in last_validation(rows) if name.startswith(VALIDATED)):
        values = [row[name] for row in rows if name in row]
        found[f"Held out, {name.removeprefix(VALIDATED)}"] = f"{values[0]:.3f} → {values[-1]:.3f}"
    found["Made with"] = ", ".join(f"{name} {number}" for name, number in versions().items())
    return {key: str(value).replace("|", "\\|") for key, value in found.items() if value}


def _batches(phases: Sequence[tuple[int, dict[str, Any]]], steps: int) -> str:
    starts = [*(start for start, _ in phases), steps + 1]
    parts = [
        (config["data"].get("train_batch_size"), end - start)
        for (start, config), end in zip(phases, starts[1:], strict=True)
    ]
    by_size = groupby(parts, key=itemgetter(0))
    return ", then ".join(f"{sum(count for _, count in same)} of {size} prompts" for size, same in by_size)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}"
