"""Exchange length-prefixed JSON messages with processes of untrusted code. Standard library only.

Reading never runs code of the sender and never reads more than `max_bytes`. Values keep their Python type.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

MAX_MESSAGE_BYTES = 64 * 2**20
"""Limit of one message between trusted processes."""


LONG_BITS = 4096
"""Longer integers are sent in hexadecimal: Python converts at most 4,300 decimal digits."""
MAX_HASH_COLLISIONS = 1000
"""Limit of hash collisions in one set or dict. Time is quadratic: 40,000 collisions take half a minute. For comparison,
the powers of two have 61 distinct hashes."""


class MessageError(ValueError):
    """The received bytes are not a valid message, or exceed the limit."""


def pack(content: Any) -> bytes:
    """Return a message with JSON-serialisable content."""
    body = json.dumps(content).encode()
    return len(body).to_bytes(4, "big") + body


def send(pipe: int, content: Any) -> None:
    """Write a message. Raises OSError if the pipe has no reader."""
    write(pipe, pack(content))


def write(pipe: int, message: bytes) -> None:
    """Write a message of `pack` completely."""
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def receive(pipe: int, max_bytes: int = MAX_MESSAGE_BYTES, deadline: float | None = None) -> Any:
    """Return the next message. Raises EOFError, TimeoutError at `deadline` (monotonic time) or MessageError."""
    length = int.from_bytes(_read_exactly(pipe, 4, deadline), "big")
    if length > max_bytes:
        raise MessageError(f"a message of {length} bytes exceeds the limit of {max_bytes}")
    return unpack(_read_exactly(pipe, length, deadline))


def unpack(body: bytes) -> Any:
    """Return the content of a message body (without length prefix)."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not a message: {error}") from None


def unpack_all(stream: bytes) -> list[Any]:
    """Return all messages of a stream, without an incomplete last one."""
    found, place = [], 0
    while len(stream) >= place + 4:
        end = place + 4 + int.from_bytes(stream[place : place + 4], "big")
        if end > len(stream):
            break
        found.append(unpack(stream[place + 4 : end]))
        place = end
    return found


def encode(value: Any) -> Any:
    """Encode a value as JSON types. Raises TypeError for arbitrary objects."""
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
    raise TypeError(f"a value of type {kind.__name__} can't be transferred; use plain data")


def decode(content: Any) -> Any:
    """Decode a value of `encode`. Raises MessageError for anything else."""
    if isinstance(content, list):
        return [decode(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    try:
        [(name, content)] = content.items()
        if name == "dict":
            keys = _check_collisions([decode(key) for key, _ in content])
            return dict(zip(keys, (decode(entry) for _, entry in content), strict=True))
        if name == "int":
            return int(content, 16)
        if name == "bytes":
            return bytes.fromhex(content)
        if name == "complex":
            return complex(*content)
        kinds = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}
        entries = [decode(entry) for entry in content]
        return kinds[name](_check_collisions(entries) if "set" in name else entries)
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"not a value: {error}") from None


def _check_collisions(entries: list[Any]) -> list[Any]:
    """Return the entries. Raises MessageError if their comparison would take too long."""
    if len(entries) - len(set(map(hash, entries))) > MAX_HASH_COLLISIONS:
        raise MessageError(f"more than {MAX_HASH_COLLISIONS} entries have colliding hashes")
    return entries


def _read_exactly(pipe: int, length: int, deadline: float | None) -> bytes:
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
