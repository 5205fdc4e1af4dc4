"""Write the objects of a Python call as files that a job can name: datasets, and a `Config` as a job file.

A file is in .cache/rlfuse/inputs/DIGEST/, below the working folder; the digest is that of its content. So the same
objects give the same job, which resumes its run, and a file is never changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfuse.api.words import plain_value
from rlfuse.config.declare import ASSIGNED, assigned
from rlfuse.config.job_file import as_yaml, settings_of
from rlfuse.config.keys import explain_name
from rlfuse.config.schema import Config
from rlfuse.config.secrets import by_name
from rlfuse.errors import ConfigError, DataError
from rlfuse.files import atomic_write

FOLDER = Path(".cache/rlfuse/inputs")
JOB_NAME = "job"
SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv")


def write_input(name: str, content: bytes, identity: bytes | None = None) -> str:
    """Write an input file, unless it exists; return its path, relative to the working folder.

    `identity`: bytes that are equal for equal inputs, if `content` also depends on the process.
    """
    path = FOLDER / hashlib.blake2b(identity or content, digest_size=8).hexdigest() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            partial.write_bytes(content)
    return str(path)


def job_file(config: Config, presets: Mapping[str, str]) -> str:
    """Return the path of a job file with `presets` and, above them, the values of `config` that were assigned or are
    not the defaults.

    An experiment also names the run. Secrets from the environment remain references.
    """
    if unknown := _unknown_attributes(config):
        raise ConfigError(unknown)
    values, defaults = (dict(settings_of(plain_value(dataclasses.asdict(each), ""))) for each in (config, Config()))
    given = {*_assigned(config)}
    changed = {name: by_name(value) for name, value in values.items() if name in given or value != defaults.get(name)}
    name = config.trainer.job_name or presets.get("experiment")
    content = {**presets, "trainer.job_name": name, **changed}  # by default that of the file
    return write_input(f"{JOB_NAME}.yaml", as_yaml(content).encode())


def _assigned(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full names of the fields that were assigned."""
    yield from (f"{prefix}{name}" for name in assigned(group))
    for name, value in vars(group).items():
        if dataclasses.is_dataclass(value):
            yield from _assigned(value, f"{prefix}{name}.")


def _unknown_attributes(group: Any, prefix: str = "") -> list[str]:
    """Return a problem for each attribute that is not a key; Python permits such assignments to dataclasses."""
    names, found = {ASSIGNED, *(each.name for each in dataclasses.fields(group))}, []
    for name, value in vars(group).items():
        if name not in names:
            found.append(explain_name(f"{prefix}{name}", None) or f"{prefix}{name}: is not a key")
        elif dataclasses.is_dataclass(value):
            found += _unknown_attributes(value, f"{prefix}{name}.")
    return found


def data_file(rows: Any, name: str) -> str:
    """Return the path of a file with these rows, in their order; `name`: of the argument and the file.

    `rows`: a path, a `datasets.Dataset`, a pandas table, or a sequence of rows (dictionaries) or prompts (texts, lists
    of messages). Without a column `data_source`, the data source is `name`, as for a file of this name.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    if isinstance(rows, Mapping):
        raise DataError(
            f"{name}: is a dictionary ({', '.join(map(str, rows))}); pass one of its splits, as {name}[...], or its "
            "columns as datasets.Dataset.from_dict(...)"
        )
    if hasattr(rows, "to_parquet"):
        return write_input(f"{name}.parquet", _parquet(rows, name))
    if not isinstance(rows, Sequence):
        raise DataError(
            f"{name}: got {type(rows).__name__}; pass a list of rows (dictionaries), a datasets.Dataset, a pandas "
            "table or the path of a file"
        )
    if not rows:
        raise DataError(f"{name}: has no rows")
    if _is_file(rows[0]):
        key = "train_files" if name == "train" else "val_files"
        raise DataError(f"{name}: {rows[0]} is a file; pass several files as data={{'{key}': [...]}}")
    lines = (_line({"prompt": row} if isinstance(row, str | list) else row, name, at) for at, row in enumerate(rows))
    return write_input(f"{name}.jsonl", b"".join(lines))


def _is_file(row: Any) -> bool:
    if isinstance(row, str):
        return os.path.isfile(row) or (row.endswith(SUFFIXES) and not re.search(r"\s", row))
    return isinstance(row, os.PathLike)


def _parquet(table: Any, name: str) -> bytes:
    try:
        count = len(table)
    except TypeError:
        raise DataError(f"{name}: is a stream of unknown length; pass a datasets.Dataset") from None
    if not count:
        raise DataError(f"{name}: has no rows")
    buffer = io.BytesIO()
    try:
        table.to_parquet(buffer, **({} if hasattr(table, "features") else {"index": False}))
    except Exception as error:  # for example a column with values of several types
        why = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name}: can't be written as a Parquet file ({type(error).__name__}: {why}); correct it"
        ) from error
    return buffer.getvalue()


def _line(row: Any, name: str, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"{name}, row {number}: a row must be a dictionary, not {type(row).__name__}")
    try:
        return f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{name}, row {number}: {error}; use text, finite numbers, None, lists and dictionaries, or pass a "
            "datasets.Dataset"
        ) from None


def _plain(value: Any) -> Any:
    """Convert numpy arrays and numbers to Python objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} can't be written as JSON")
