"""File of the last responses of samples, by key: token ids that a later generation of the same sample can draft.

Role: written by a run and by `rlfuse eval`, read by the repetition of a step, the next epoch and the next evaluation.
Invariants: a response is one record with a checksum, appended in one write. A killed writer leaves at most one
incomplete record, the last; reading ends at the first invalid record, and the next writer truncates the file there.
A file above its limit is replaced atomically by its newest records. Nothing depends on the content: drafts are
verified. Waits: for nothing.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from rlfuse.files import atomic_write

FILE = "drafts.bin"
MIB = 2**20
MAGIC = b"rlfuse1\n"
CHECKSUM = struct.Struct("<I")
FIELDS = struct.Struct("<III")
"""Step, key (`Sample.draft_key`), number of tokens; the token ids follow as int32."""
HEADER_BYTES = CHECKSUM.size + FIELDS.size
TOKEN = np.dtype("<i4")
KEPT_SHARE = 0.75
"""Share of the limit that the newest responses may take after the oldest are dropped."""


class StoredResponse(NamedTuple):
    """A response of an earlier generation."""

    step: int
    token_ids: np.ndarray
    """int32 [T]."""


class _Place(NamedTuple):
    step: int
    offset: int
    """Byte offset of the token ids."""
    tokens: int

    @property
    def start(self) -> int:
        return self.offset - HEADER_BYTES

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + self.tokens * TOKEN.itemsize


class StoredResponses:
    """Reader of a file. Raises FileNotFoundError if there is none; a file of another format has no responses."""

    def __init__(self, path: Path):
        self.path = path
        self.last_step = 0
        """Highest step of all responses."""
        self._places: dict[int, _Place] = {}
        """Key -> place of its response, oldest first."""
        self._file = self._open()
        self._size = self._scan()

    def _open(self) -> IO[bytes]:
        return self.path.open("rb", buffering=0)

    @property
    def count(self) -> int:
        """Number of responses."""
        return len(self._places)

    def find(self, key: int) -> StoredResponse | None:
        """Return the last response with this key, or None."""
        if (place := self._places.get(key)) is None:
            return None
        content = os.pread(self._file.fileno(), place.tokens * TOKEN.itemsize, place.offset)
        if len(content) < place.tokens * TOKEN.itemsize:  # truncated by another process
            return None
        return StoredResponse(place.step, np.frombuffer(content, TOKEN))

    def step_of(self, key: int) -> int | None:
        """Return the step of the last response with this key, or None."""
        place = self._places.get(key)
        return None if place is None else place.step

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> int:
        """Index all valid records; return the byte offset of their end, 0 for a file of another format.

        The file is read instead of mapped, because its writer may truncate it meanwhile.
        """
        size = os.fstat(self._file.fileno()).st_size
        with os.fdopen(os.dup(self._file.fileno()), "rb") as content:
            content.seek(0)
            if content.read(len(MAGIC)) != MAGIC:
                return 0
            start = len(MAGIC)
            while start + HEADER_BYTES <= size and len(header := content.read(HEADER_BYTES)) == HEADER_BYTES:
                step, key, tokens = FIELDS.unpack_from(header, CHECKSUM.size)
                place = _Place(step, start + HEADER_BYTES, tokens)
                if start + place.bytes > size:
                    break
                checksum = zlib.crc32(content.read(tokens * TOKEN.itemsize), zlib.crc32(header[CHECKSUM.size :]))
                if (checksum,) != CHECKSUM.unpack_from(header):
                    break
                self._remember(key, place)
                start += place.bytes
            return start

    def _remember(self, key: int, place: _Place) -> None:
        self._places.pop(key, None)
        self._places[key] = place
        self.last_step = max(self.last_step, place.step)


class ResponseStore(StoredResponses):
    """The only writer of a file of at most `max_bytes`. `say` reports that the file could not be written; the file is
    then removed, and later responses are not stored."""

    def __init__(self, path: Path, max_bytes: int, say: Callable[[str], None] = print):
        self.dropped = 0
        """Number of responses that were dropped because of the limit."""
        self._max_bytes, self._say, self._failed = max_bytes, say, False
        super().__init__(path)
        try:
            self._file.truncate(self._size)
            if not self._size:
                self._write(MAGIC)
        except OSError as error:
            self._give_up(error)

    def _open(self) -> IO[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in self.path.parent.glob(f".{self.path.name}.*.part"):  # of a killed writer
            unfinished.unlink(missing_ok=True)
        return self.path.open("a+b", buffering=0)

    def add(self, step: int, key: int, token_ids: np.ndarray) -> None:
        """Store a response, int32 [T], in place of an earlier one with the same key."""
        fields = FIELDS.pack(step, key, len(token_ids)) + np.ascontiguousarray(token_ids, TOKEN).tobytes()
        record = CHECKSUM.pack(zlib.crc32(fields)) + fields
        if self._failed or len(MAGIC) + len(record) > self._max_bytes:
            return
        try:
            if self._size + len(record) > self._max_bytes:
                self._drop_oldest(len(record))
            start = self._size
            self._write(record)
        except OSError as error:
            return self._give_up(error)
        self._remember(key, _Place(step, start + HEADER_BYTES, len(token_ids)))

    def _write(self, content: bytes) -> None:
        """Append `content`. OSError if it was not written in full."""
        if (written := self._file.write(content)) < len(content):
            raise OSError(f"only {written} of {len(content)} bytes were written")
        self._size += written

    def _drop_oldest(self, needed: int) -> None:
        """Rewrite the file with its newest responses, so that `needed` bytes fit."""
        room = min(KEPT_SHARE * self._max_bytes, self._max_bytes - needed) - len(MAGIC)
        kept: dict[int, _Place] = {}
        for key, place in reversed(self._places.items()):
            if (room := room - place.bytes) < 0:
                break
            kept[key] = place
        self.dropped += len(self._places) - len(kept)
        with atomic_write(self.path) as aside, aside.open("wb") as file:
            file.write(MAGIC)
            for place in reversed(kept.values()):
                file.write(os.pread(self._file.fileno(), place.bytes, place.start))
        self.close()
        self._file, self._places = self._open(), {}
        self._size = self._scan()

    def _give_up(self, error: Exception) -> None:
        self._failed, self._places = True, {}
        self.path.unlink(missing_ok=True)
        self._say(
            f"{self.path} could not be written ({error}) and was removed. The run continues; a repeated step will be "
            "generated without drafts."
        )
