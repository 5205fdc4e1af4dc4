"""Read rows of parquet, JSON, JSONL, CSV and Hugging Face folders in verl's or TRL's shape; malformed ones raise."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet

from rlfuse.data.media import Media, MediaFolder, content_parts, parse_media, prepend_markers
from rlfuse.data.messages import (
    Message,
    decode_messages,
    map_texts,
    modality,
    parse_marked_messages,
    parse_messages,
    parse_tools,
    refuse_surrogates,
    short_repr,
)
from rlfuse.errors import DataError
from rlfuse.parsing import parse_json
from rlfuse.video.plan import TaskKind
from rlfuse.video.prompt import MARKERS, unescape_markers

TRUTHS = ("ground_truth", "answer", "solution")
PROMPTS = ("prompt", "messages", "conversation", "question", "problem", "instruction", "query", "input", "text")
"""Usual names of prompt columns, most likely first."""
COMPLETIONS = ("chosen", "rejected", "completion", "response")
LARGEST, MAX_COMPRESSION = 256 << 20, 1000
"""Uncompressed bytes of a parquet file that are always accepted; above them, the largest compression ratio."""
BATCH = 1000


@dataclass(frozen=True, slots=True)
class DataRow:
    """Parsed row, independent of the file format."""

    messages: tuple[Message, ...]
    """Chat messages from `messages.parse_marked_messages`; a string prompt becomes one user message."""
    data_source: str
    ground_truth: Any
    columns: dict[str, Any]
    """The row as in the file, with messages from `messages.parse_messages`."""
    videos: tuple[Media, ...] = ()
    images: tuple[Media, ...] = ()
    task: TaskKind | None = None
    modalities: frozenset[str] = frozenset()
    tools: tuple[dict[str, Any], ...] = ()
    is_chat: bool = True
    """False for a plain text prompt, tokenised without a chat template."""


def read_rows(path: str, prompt_key: str, prompt_is_chat: bool = True, media_root: str | None = None) -> list[DataRow]:
    """Return all rows of a file, in order. `prompt_is_chat`: a string prompt is a user message or JSON messages."""
    file, rows = Path(path).expanduser(), read_raw_rows(path)
    if not any(prompt_key in row for _, row in rows):
        columns = sorted({name for _, row in rows for name in row})
        likely = _prompt_column(prompt_key, rows[0][1])
        remedy = f"Set data.prompt_key={likely}" if likely else "Set data.prompt_key to the column with the prompts"
        raise DataError(f"{path} has no column {prompt_key!r}; its columns are {', '.join(columns)}. {remedy}.")
    folder = (
        MediaFolder(Path(media_root).expanduser(), is_root=True) if media_root is not None else MediaFolder(file.parent)
    )
    return [_checked(f"{path}, {where}", row, prompt_key, file.stem, folder, prompt_is_chat) for where, row in rows]


def _prompt_column(wanted: str, row: dict[str, Any]) -> str | None:
    usable, chats = [], []
    for name, value in row.items():
        with suppress(DataError):
            parse_messages(name, value, "user")
            usable.append(name)
            chats += [name] if isinstance(value, list) else []
    near = difflib.get_close_matches(wanted, usable, 1, cutoff=0.75)
    named = [name for known in PROMPTS for name in usable if name.lower() == known]
    return next(iter([*near, *named, *(name for name in chats if name not in COMPLETIONS)]), None)


def read_raw_rows(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (location, row) of each row, unparsed; DataError if the file is missing or empty."""
    file = Path(path).expanduser()
    if not file.exists():
        raise DataError(f"data: {path} does not exist. Correct data.train_files or data.val_files.")
    rows = list(_read(file))
    if not rows:
        raise DataError(f"{path} has no rows.")
    return rows


def _read(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.is_dir():
        rows = _dataset(file)
    elif file.suffix == ".parquet":
        rows = _parquet(file)
    elif file.suffix in (".jsonl", ".ndjson", ".json"):
        rows = _json(file)
    elif file.suffix == ".csv":
        rows = _csv(file)
    else:
        raise DataError(f"{file}: {file.suffix or 'a file without a suffix'} is not parquet, json, jsonl or csv.")
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{file}, {where}: a row must be an object, not {type(row).__name__}.")
        yield where, row


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            facts, size = opened.metadata, file.stat().st_size
            expanded = sum(facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
            if facts.num_rows > size or expanded > max(LARGEST, MAX_COMPRESSION * size):
                raise DataError(
                    f"{file}: {size:,} bytes expand to {facts.num_rows:,} rows of {expanded:,} bytes, an implausible "
                    "compression ratio. Write the file again from its source."
                )
            table = opened.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} can't be read as parquet: {error}") from error
    return ((f"row {i}", row) for i, row in enumerate(table.to_pylist()))


def _dataset(folder: Path) -> Iterator[tuple[str, Any]]:
    from datasets import Dataset, load_from_disk  # slow import, rarely needed

    try:
        data = load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise DataError(f"{folder} is not a dataset saved with save_to_disk.") from error
    if not isinstance(data, Dataset):
        raise DataError(
            f"{folder} contains several splits ({', '.join(data)}). Choose one, for instance {folder / 'train'}."
        )
    batches = data.with_format("arrow").iter(BATCH)  # images stay encoded
    rows = (row for batch in batches for row in batch.to_pylist())
    return ((f"row {i}", row) for i, row in enumerate(rows))


def _text(file: Path, newline: str | None = None) -> str:
    try:
        with file.open(encoding="utf-8-sig", newline=newline) as opened:
            return opened.read()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, byte {error.start}: not UTF-8. Save it as UTF-8.") from error


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 30)
    lines = csv.reader(StringIO(_text(file, newline=""), newline=""), strict=True)
    try:
        names = next(lines, [])
        for cells in filter(None, lines):
            if not len(cells) == len(names) == len(set(names)):
                raise DataError(
                    f"{file}, line {lines.line_num}: {len(cells)} cells, but the header has {len(set(names))} "
                    "distinct columns. Separate cells by commas, and quote cells that contain one."
                )
            yield f"line {lines.line_num}", {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise DataError(f"{file}, line {lines.line_num}: not CSV ({error}).") from error


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    text = _text(file)
    if file.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = ((f"row {i}", row) for i, row in enumerate(parse_json(text)))
        except json.JSONDecodeError as error:
            raise DataError(f"{file}, line {error.lineno}: not JSON ({error.msg}, column {error.colno}).") from error
        except ValueError as error:
            raise DataError(f"{file}: {error}.") from None
    else:
        rows = _json_lines(file, text)
    escaped = re.search(r"\\u[dD][89a-fA-F]", text) is not None
    for where, row in rows:
        for name, value in row.items() if escaped and isinstance(row, dict) else ():
            refuse_surrogates(f"{file}, {where}, field {name}", value)
        yield where, row


def _json_lines(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", parse_json(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}, line {number}: not JSON ({error.msg}, column {error.colno}).") from error
            except ValueError as error:
                raise DataError(f"{file}, line {number}: {error}.") from None


def _checked(
    where: str, row: dict[str, Any], prompt_key: str, source: str, folder: MediaFolder, prompt_is_chat: bool
) -> DataRow:
    field, prompt = f"{where}, field {prompt_key}", row.get(prompt_key)
    is_chat = prompt_is_chat or not isinstance(prompt, str)
    prompt = decode_messages(field, prompt) if is_chat else prompt
    messages = parse_marked_messages(field, prompt, "user")
    parts = [] if isinstance(prompt, str) else [part for each in prompt for part in content_parts(each)]
    shown: dict[str, tuple[Media, ...]] = {}
    for kind in ("image", "video"):
        marked = any(MARKERS[kind] in message["content"] for message in messages)
        shown[kind] = parse_media(where, row, prompt_key, parts, kind, folder, marked)
        messages = messages if marked else prepend_markers(messages, MARKERS[kind] * len(shown[kind]))
    modalities = {*(kind for kind, media in shown.items() if media), *filter(None, map(modality, parts))}
    columns = (
        row if isinstance(prompt, str) else row | {prompt_key: [map_texts(unescape_markers, each) for each in messages]}
    )
    return DataRow(
        messages,
        str(row.get("data_source") or source),
        _ground_truth(where, row),
        columns,
        shown["video"],
        shown["image"],
        _task(where, row) if shown["video"] else None,
        frozenset(modalities),
        tuple(parse_tools(f"{where}, field tools", row.get("tools"))),
        is_chat,
    )


def _task(where: str, row: dict[str, Any]) -> TaskKind | None:
    extra = row.get("extra_info")
    task = extra.get("task") if isinstance(extra, dict) else None
    if task is not None and task not in list(TaskKind):
        valid = ", ".join(TaskKind)
        raise DataError(
            f"{where}, field extra_info.task: {short_repr(task)} is not a valid task; valid are {valid}. Correct it, "
            "or remove the key to use video.task."
        )
    return None if task is None else TaskKind(task)


def _ground_truth(where: str, row: dict[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    if reward_model is not None and not isinstance(reward_model, dict):
        raise DataError(
            f"{where}, field reward_model: {short_repr(reward_model)}; expected an object with style and ground_truth."
        )
    truth = (reward_model or {}).get("ground_truth")
    return next((row[name] for name in TRUTHS if row.get(name) is not None), None) if truth is None else truth
