"""Read what wandb has on disk of a run: the transaction logs (`*.wandb`) of all its processes.

wandb offers no reader. A log has the format of LevelDB: after a header, blocks of 32 KiB with fragments of records,
each with a checksum, size and kind. Reading ends at an incomplete or damaged record, as a killed process leaves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlfuse.observe.sink import AXIS

HEADER, BLOCK = 7, 32768
FRAGMENT = struct.Struct("<IHB")
"""Checksum, size, kind."""
FULL, LAST = 1, 4


def log_files(folder: Path, run_id: str) -> list[Path]:
    """Return the transaction logs of a run, oldest first. `folder`: the run folder."""
    return sorted(folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb"))


def logged_steps(paths: Iterable[Path]) -> tuple[set[int], int]:
    """Return the training steps with a row of scalars, and the highest row number (-1: none)."""
    steps, last = set(), -1
    for row in (row for path in paths for row in history(path)):
        last = max(last, int(row.get("_step", -1)))
        # Values of tables and pictures are objects in JSON.
        if AXIS in row and any(name[0] != "_" and name != AXIS and value[:1] != "{" for name, value in row.items()):
            steps.add(int(float(row[AXIS])))
    return steps, last


def history(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a transaction log as name -> value in JSON. Names with a leading "_" are wandb's."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        try:
            record = Record.FromString(content)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def _records(content: bytes) -> Iterator[bytes]:
    at, record = HEADER, b""
    while at + FRAGMENT.size <= len(content):
        rest = BLOCK - at % BLOCK
        if rest < FRAGMENT.size:  # padding at the end of a block
            at += rest
            continue
        _, size, kind = FRAGMENT.unpack_from(content, at)
        start = at + FRAGMENT.size
        at = start + size
        if kind == 0 or at > len(content):
            return
        record += content[start:at]
        if kind in (FULL, LAST):
            yield record
            record = b""
