"""Record digests of custom reward files and of models in `inputs.jsonl`, to notice when one was changed in place.

Files are read, never executed; unreadable ones are left out. Modules that a custom file imports are not included.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from rlfuse.config.changes import Change, Effect, rule
from rlfuse.config.facts import reward_file, reward_functions
from rlfuse.config.schema import Config
from rlfuse.config.valid_values import functions_named_by
from rlfuse.files import RowFile, read_rows

FILE = "inputs.jsonl"
MODELS = ("model.path", "critic.path", "ref.path")
MOVED = "moved, or copied: the same config.json and weights of the same sizes"
END = 1 << 16
"""Bytes of each file of weights: models of one family, trained further, have the same sizes."""
SHOWN = 12


def digests(config: Config) -> dict[str, str]:
    """The digest of each input that is here: of a user's functions by their file as named, of models by key."""
    found = dict[str, str]()
    for file in _files(config):
        with suppress(OSError):
            found[file] = hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
    paths = (config.model.path, config.critic.path, config.ref.path)
    models = zip(MODELS, map(of_model, paths), strict=True)
    return found | {key: digest for key, digest in models if digest is not None}


def _files(config: Config) -> dict[str, str]:
    """Return each custom file as named, with the first key that names it."""
    named = [("reward.functions", function) for function in reward_functions(config)]
    found = dict[str, str]()
    for key, function in [*named, *functions_named_by(config)]:
        if file := reward_file(function):
            found.setdefault(file, key)
    return found


def of_model(path: str | None) -> str | None:
    """The digest of a model's folder; None of a hub name, and where there are no weights."""
    if not path:
        return None
    folder = Path(path)
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        weights = sorted(folder.glob("*.safetensors"))
        for file in weights:
            with file.open("rb") as content:
                size = content.seek(0, os.SEEK_END)
                content.seek(max(0, size - END))
                digest.update(f"{file.name} {size} ".encode() + content.read())
    except OSError:
        return None
    return digest.hexdigest() if weights else None


def known(folder: Path, step: int | None) -> dict[str, str]:
    """The digests of what the run of this folder had after this step; None: after its last."""
    rows = (row for row in read_rows(folder / FILE) if step is None or row["step"] <= step)
    return {row["input"]: row["sha256"] for row in rows}


def note(folder: Path, step: int, now: Mapping[str, str]) -> None:
    """Append what is new after this step; rows of steps behind it, which are abandoned, go."""
    if not now and not (folder / FILE).exists():
        return
    with closing(RowFile(folder / FILE, keep=lambda row: row["step"] <= step)) as file:
        before = known(folder, step)
        new = {name: digest for name, digest in now.items() if before.get(name) != digest}
        file.append({"step": step, "input": name, "sha256": digest} for name, digest in new.items())


def judged(changes: Sequence[Change], before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Changes of settings; that of a model's path by what is there."""

    def same(change: Change) -> bool:
        was = before.get(change.key) or of_model(change.was if isinstance(change.was, str) else None)
        return was is not None and was == now.get(change.key)

    moved = {change.key for change in changes if change.key in MODELS and same(change)}
    return [replace(c, effect=Effect.BESIDE, reason=MOVED) if c.key in moved else c for c in changes]


def edited(config: Config, before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Files of functions with the same name and another text, as changes that are told like those of settings."""
    found = []
    for file, key in _files(config).items():
        if file in before and file in now and before[file] != now[file]:
            effect, reason = rule(key)
            found.append(Change(file, before[file][:SHOWN], now[file][:SHOWN], effect, f"edited: {reason}"))
    return found
