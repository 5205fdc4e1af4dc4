"""Call a reward that is an HTTP service with OpenRLHF's payload: `reward.functions=[http://host:port/path]`.

    POST {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}
    200  {"rewards": [...], "scores": [...], "extra_logs": {...}}

Any other answer is a failure with the service's message, never a number.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rlfuse.files import finite
from rlfuse.parsing import parse_json
from rlfuse.rewards.api.shapes import RewardFunction, adapt

MOST_BYTES = 256 * 2**20
SHOWN = 2000


class ServiceError(RuntimeError):
    """A reward service gave no rewards. The message has its address, its status and its words."""


def service(url: str) -> RewardFunction:
    """The reward function behind a URL, named after its path."""
    place = urlsplit(url)
    name = place.path.rstrip("/").rpartition("/")[2] or place.hostname or url

    async def post(queries, prompts, labels):
        return await _ask(url, {"query": queries, "prompts": prompts, "labels": labels})

    return adapt(name, post, url)


async def _ask(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    try:
        async with aiohttp.ClientSession() as session, session.post(url, json=finite(payload)) as answer:
            body = bytearray()
            async for part in answer.content.iter_chunked(2**16):
                body += part
                if len(body) > MOST_BYTES:
                    raise ServiceError(f"{url} answered more than {MOST_BYTES >> 20} MiB")
    except aiohttp.ClientError as error:
        raise ServiceError(f"{url} could not be asked: {type(error).__name__}: {error}") from None
    text = body.decode(errors="replace")
    if answer.status != 200:
        raise ServiceError(f"{url} answered with status {answer.status}: {_words(text)}")
    try:
        return parse_json(text)
    except ValueError:
        raise ServiceError(f"{url} answered something else than JSON: {_words(text)}") from None


def _words(text: str) -> str:
    with suppress(ValueError, TypeError, KeyError):
        text = parse_json(text)["error"]
    return str(text)[:SHOWN]
