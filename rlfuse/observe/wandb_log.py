"""Read what wandb has on disk of a run: the transaction logs (`*.wandb`) of all its processes.

wandb offers no reader. A log has the format of LevelDB: after a header, blocks of 32 KiB with fragments of records,
each with a checksum, size and kind. The last record of a killed process is incomplete and skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

HEADER, BLOCK = 7, 32768
FRAGMENT = struct.Struct("<IHB")
"""Checksum, size, kind."""
FULL, LAST = 1, 4


def log_files(folder: Path, run_id: str) -> list[Path]:
    """Return the transaction logs of a run, oldest first. `folder`: the run folder."""
    return sorted(folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb"))


def history(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a transaction log as name -> value in JSON. Names with a leading "_" are wandb's."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
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
