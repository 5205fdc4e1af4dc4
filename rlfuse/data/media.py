"""Parse a row's clips and images in the formats of public datasets. No file is opened; unknown keys are errors."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rlfuse.data.messages import Message, modality, short_repr
from rlfuse.errors import DataError
from rlfuse.video.frame_list import SUFFIX
from rlfuse.video.media_settings import ClipSettings, ImageSettings

NAMES = {
    "image": ("bytes", "path", "image", "image_url", "url"),
    "video": ("bytes", "path", "video", "video_url", "url"),
}
"""Keys of an object (part of a message, or entry of a column) that may hold a clip or image."""
SETTINGS = {"image": ImageSettings, "video": ClipSettings}
OTHER_KEYS = ("type", "index", "detail")
"""`index`: index in the column. `detail`: OpenAI's key, ignored."""
WANTED = {
    "image": "a file path or bytes is expected, such as [{'image': 'pictures/a.png'}] or [{'bytes': ...}]",
    "video": "a file path, bytes or a list of frames is expected, such as [{'video': 'clips/a.mp4'}], "
    "[{'bytes': ...}] or [{'video': ['frames/0.png', 'frames/1.png']}]",
}
FRAME_RATE = 2.0
"""Default frames per second of a list of frames, as in qwen-vl-utils."""
FRAMES_URL = "data:video/jpeg;base64,"
"""Prefix of vLLM's URL for a comma-separated list of frames."""
_LOCAL = re.compile(r"file:(?=/)(//(localhost(?=/))?)?", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}[=\s]*")
_MAGIC = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|BM|\x1aE\xdf\xa3|FLV|OggS|G@|\0\0\x01\xba|0&\xb2u|.{4}(ftyp|moov|mdat|free)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Media:
    """A clip or image of a row."""

    source: str | bytes | tuple[str | bytes, ...]
    """Absolute path, file contents, or a list of these for the frames of a clip."""
    settings: ImageSettings

    @property
    def has_bytes(self) -> bool:
        """True if the row contains bytes, of the file or of a frame, instead of paths only."""
        sources = self.source if isinstance(self.source, tuple) else (self.source,)
        return any(isinstance(each, bytes) for each in sources)


@dataclass(frozen=True, slots=True)
class MediaFolder:
    """Folder that relative paths of rows refer to."""

    path: Path
    is_root: bool = False
    """True for data.media_root: paths outside of it are rejected."""

    def path_of(self, where: str, given: Any, path: str) -> str:
        """Return a row's path as an absolute path; DataError if it is not allowed. `given`: its value in the row."""
        if "\0" in path:
            raise DataError(f"{where}: {short_repr(given)} is not a path: it contains a null character. Correct it.")
        file = str(self.path.absolute() / os.path.expanduser(path))
        if not self.is_root:
            return file
        root, file = os.path.realpath(self.path), os.path.realpath(file)
        if not Path(file).is_relative_to(root):
            raise DataError(
                f"{where}: {short_repr(given)} is {file}, outside of data.media_root={root}. Move the file into that "
                "folder and correct the path, or drop the row."
            )
        if file.endswith(SUFFIX):
            raise DataError(
                f"{where}: {short_repr(given)} is a file that names other files, not allowed with "
                f"data.media_root={root}. Put the list of frames into the row, such as "
                "[{'video': ['0.png', '1.png']}]."
            )
        return file


def parse_media(
    where: str,
    row: Mapping[str, Any],
    prompt_key: str,
    parts: Sequence[Any],
    kind: str,
    folder: MediaFolder,
    is_marked: bool,
) -> tuple[Media, ...]:
    """Return a row's clips or images in order, from `parts` of its messages or from its columns."""
    placeholders = [part for part in parts if modality(part) == kind]
    held = [_inside(part, kind) is not None for part in placeholders]
    entries = [] if placeholders and all(held) else _column(row, kind, is_marked)
    found, used = [], list[int]()
    for part, holds in zip(placeholders, held, strict=True):
        place = len(used) if part.get("index") is None else part["index"]
        if holds:
            found.append((prompt_key, [part]))
        elif place in range(len(entries)):
            name, each = entries[place]
            found.append((name, [each, part]))
            used.append(place)
    found += [(name, [each]) for place, (name, each) in enumerate(entries) if place not in used]
    return tuple(_media(f"{where}, field {name}", given, kind, folder) for name, given in found)


def content_parts(message: Message) -> list[Any]:
    """Return the parts of a message's content; [] if the content is a string."""
    return message["content"] if isinstance(message["content"], list) else []


def prepend_markers(messages: tuple[Message, ...], markers: str) -> tuple[Message, ...]:
    """Return the messages with markers prepended to the first user message, as in TRL."""
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    first = {**messages[place], "content": markers + messages[place]["content"]}
    return (*messages[:place], first, *messages[place + 1 :])


def _column(row: Mapping[str, Any], kind: str, is_marked: bool) -> list[tuple[str, Any]]:
    if several := row.get(f"{kind}s"):
        return [(f"{kind}s", each) for each in (several if isinstance(several, list) else [several])]
    single = row.get(kind)
    holds = isinstance(single, bytes) or (isinstance(single, dict) and _inside(single, kind) is not None)
    if not single or not (is_marked or holds):
        return []
    # A list is several images in an image column, but the frames of one clip in a video column.
    return [(kind, each) for each in (single if kind == "image" and isinstance(single, list) else [single])]


def _inside(given: Any, kind: str) -> Any:
    while isinstance(given, dict):
        given = next((given[name] for name in NAMES[kind] if given.get(name) is not None), None)
    return given


def _media(where: str, given: Sequence[Any], kind: str, folder: MediaFolder) -> Media:
    held, settings = _unwrapped(where, given[0], kind)
    for part in given[1:]:
        settings |= _unwrapped(where, part, kind)[1]
    frames = _frames(held) if kind == "video" else []
    try:
        made = SETTINGS[kind].of(settings)
        if frames:
            rate = made.sample_fps or made.fps or FRAME_RATE
            made = replace(made, sample_fps=rate, fps=made.fps if made.sample_fps else None)
        elif settings.get("sample_fps"):
            raise ValueError("sample_fps applies to lists of frames only. Use fps")
    except ValueError as error:
        raise DataError(f"{where}: {short_repr(given[0])}: {error}.") from None
    if frames:
        return Media(tuple(_frame(where, frame, folder) for frame in frames), made)
    return Media(_source(where, held, given[0], kind, folder), made)


def _unwrapped(where: str, given: Any, kind: str) -> tuple[Any, dict[str, Any]]:
    settings: dict[str, Any] = {}
    while isinstance(given, dict):
        keys = {key: value for key, value in given.items() if value is not None and (key, value) != ("text", "")}
        held = [name for name in NAMES[kind] if name in keys]
        names = SETTINGS[kind].names()
        if unknown := keys.keys() - {*NAMES[kind], *names, *OTHER_KEYS}:
            raise DataError(
                f"{where}: {short_repr(given)} where {WANTED[kind]}: the key {min(unknown)!r} is not known; valid are "
                f"{', '.join((*NAMES[kind], *names))}. Correct or remove it."
            )
        if len(held) > 1 and held != ["bytes", "path"]:
            raise DataError(f"{where}: {short_repr(given)} has both {held[0]!r} and {held[1]!r}. Remove one.")
        settings = {name: keys[name] for name in names if name in keys} | settings
        given = keys[held[0]] if held else None
        if held[:1] == ["bytes"] and isinstance(given, str):
            given = f"data:;base64,{given}"
    return given, settings


def _frames(held: Any) -> list[Any]:
    if isinstance(held, str) and held.startswith(FRAMES_URL):
        return [f"data:;base64,{each}" for each in held.removeprefix(FRAMES_URL).split(",")]
    return held if isinstance(held, list) else []


def _frame(where: str, given: Any, folder: MediaFolder) -> str | bytes:
    held, settings = _unwrapped(where, given, "image")
    if settings:
        raise DataError(f"{where}: frames can't have settings, got {settings}. Move them to the clip.")
    return _source(where, held, given, "image", folder)


def _source(where: str, held: Any, given: Any, kind: str, folder: MediaFolder) -> str | bytes:
    if isinstance(held, str):
        with suppress(ValueError):
            held = _decoded(held)
    if isinstance(held, bytes):
        return held
    if not isinstance(held, str) or not held or held.startswith("data:"):
        raise DataError(f"{where}: {short_repr(given)} where {WANTED[kind]}.")
    local = _LOCAL.match(held)
    path = unquote(held[local.end() :]) if local else held
    if remote := _SCHEME.match(path):
        raise DataError(
            f"{where}: {short_repr(given)} where {WANTED[kind]}: {remote[1]} URLs are not supported. Copy the file "
            "to a folder shared by all nodes, and give its path."
        )
    return folder.path_of(where, given, path)


def _decoded(text: str) -> str | bytes:
    """Return the decoded bytes of base64 text, other text unchanged. ValueError for invalid base64."""
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        text = unquote(body) if head.endswith(";base64") and body else "?"
    elif not (_BASE64.fullmatch(text) and _MAGIC.match(base64.b64decode(text.split()[0][:24]))):
        return text
    return base64.b64decode("".join(text.split()), validate=True)
