"""Exchange JSON messages with a length prefix with processes of untrusted code. Standard library only.

Reading never runs code of the sender and never reads more than `most` bytes. Values keep their Python type.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

MAX_MESSAGE_BYTES = 64 * 2**20
"""Of one message between processes that trust each other."""


LONG_BITS = 4096
"""Longer whole numbers go as hexadecimal digits: Python reads and writes 4,300 decimal ones at most."""
MAX_HASH_COLLISIONS = 1000
"""Entries of one set or dict whose hash another has too. Each is compared with all those, so that forty thousand of
them take half a minute; the powers of two, by comparison, share 61 hashes."""


class MessageError(ValueError):
    """What arrived is no message, or is too long."""


def pack(content: Any) -> bytes:
    """A message of what JSON can say."""
    body = json.dumps(content).encode()
    return len(body).to_bytes(4, "big") + body


def send(pipe: int, content: Any) -> None:
    """Write a message; OSError where nobody reads."""
    write(pipe, pack(content))


def write(pipe: int, message: bytes) -> None:
    """Write what `pack` made."""
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def receive(pipe: int, most: int = MAX_MESSAGE_BYTES, deadline: float | None = None) -> Any:
    """Return the next message. EOFError, TimeoutError at `deadline` (monotonic), or MessageError."""
    length = int.from_bytes(_exactly(pipe, 4, deadline), "big")
    if length > most:
        raise MessageError(f"a message of {length} bytes; {most} at most")
    return unpack(_exactly(pipe, length, deadline))


def unpack(body: bytes) -> Any:
    """A message's content, without the length in front."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no message: {error}") from None


def unpack_all(stream: bytes) -> list[Any]:
    """The messages of a whole stream; what an ended sender did not finish is left out."""
    found, place = [], 0
    while len(stream) >= place + 4:
        end = place + 4 + int.from_bytes(stream[place : place + 4], "big")
        if end > len(stream):
            break
        found.append(unpack(stream[place + 4 : end]))
        place = end
    return found


def encode(value: Any) -> Any:
    """A value as JSON can say it; TypeError for objects."""
    kind = type(value)
    if isinstance(value, int) and value.bit_length() > LONG_BITS:
        return {"int": f"{int(value):x}"}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(entry) for entry in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
    for name, base in (("tuple", tuple), ("set", set), ("frozenset", frozenset), ("list", list)):
        if isinstance(value, base):
            return {name: [encode(entry) for entry in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for base in (bool, int, float, str):
        if isinstance(value, base):  # enumerations and the like
            return base(value)
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist())
    raise TypeError(f"a value of type {kind.__name__} can't be handed over; plain data can")


def decode(said: Any) -> Any:
    """The value again; MessageError for what `encode` never says."""
    if isinstance(said, list):
        return [decode(entry) for entry in said]
    if not isinstance(said, dict):
        return said
    try:
        [(name, content)] = said.items()
        if name == "dict":
            keys = _few_alike([decode(key) for key, _ in content])
            return dict(zip(keys, (decode(entry) for _, entry in content), strict=True))
        if name == "int":
            return int(content, 16)
        if name == "bytes":
            return bytes.fromhex(content)
        if name == "complex":
            return complex(*content)
        kinds = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}
        entries = [decode(entry) for entry in content]
        return kinds[name](_few_alike(entries) if "set" in name else entries)
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"no value: {error}") from None


def _few_alike(entries: list[Any]) -> list[Any]:
    """Refuse entries whose comparison would take exponential time."""
    if len(entries) - len(set(map(hash, entries))) > MAX_HASH_COLLISIONS:
        raise MessageError(f"more than {MAX_HASH_COLLISIONS} entries have hashes that others have")
    return entries


def _exactly(pipe: int, length: int, deadline: float | None) -> bytes:
    parts, missing = [], length
    while missing:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, min(missing, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
