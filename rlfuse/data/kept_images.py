"""Keep images, clips given as bytes and frame lists as files next to the runs, named by content, readable by all nodes.

Files appear complete and are removed after `UNUSED_S` without use.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlfuse.errors import DataError

UNUSED_S = 180 * 86400.0
"""Longer than any run goes on: every start asks for all images of its data, but none is read that has an embedding."""


@dataclass(frozen=True, slots=True)
class KeptImages:
    """One folder of them."""

    folder: Path

    def file_of(self, image: str | bytes, suffix: str = "") -> str:
        """Return the path of an image or clip, whose bytes are written once. DataError where they can't be."""
        if isinstance(image, str):
            return image
        path = self.folder / f"{hashlib.sha256(image).hexdigest()[:40]}{suffix}"
        try:
            self._keep(path, image)
        except OSError as error:
            raise DataError(
                f"images: bytes of rows can't be kept in {self.folder} ({error}); set trainer.default_local_dir to a "
                "folder that can be written, on several nodes to one that all of them see"
            ) from error
        return str(path)

    def prune(self) -> None:
        for path in self.folder.glob("*"):
            with suppress(OSError):  # another job was faster, or the file is another user's
                status = path.stat()
                if time.time() - max(status.st_mtime, status.st_atime) > UNUSED_S:
                    path.unlink()

    def _keep(self, path: Path, image: bytes) -> None:
        if path.exists() and path.stat().st_size == len(image):  # a crash of the host may have cut it short
            with suppress(OSError):  # another user's or read-only
                os.utime(path)
            if path.exists():  # no other start removed it meanwhile
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{uuid.uuid4().hex}")
        aside.write_bytes(image)
        aside.replace(path)  # whole, also beside another job that writes the same
