"""`rlfuse reward serve path/file.py:function`: serve a reward over HTTP with OpenRLHF's payload.

    request --(401, 403, 415)--> read --(408, 413)--> waiting --(503)--> a worker process, for --timeout s -> answer

A failed reward is status 500 with message and traceback. Connections, uploads, request sizes, waiting requests, time
and memory are bounded. Web pages cannot send work: without a token only requests to a loopback name are accepted, never
from another origin, and only JSON. Beyond loopback a token is required.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hmac
import json
import os
import signal
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from pebble import ProcessExpired, ProcessPool

from rlfuse.cluster.child_processes import PoolContext, end_with_parent, kill_stopped_workers, restore_child_signals
from rlfuse.config.own_errors import headline
from rlfuse.errors import RewardError
from rlfuse.parsing import parse_json
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import Item, Outcome, item_of_row
from rlfuse.rewards.api.shapes import RewardFunction, timed_out
from rlfuse.rewards.sandbox.bounded_worker import USED_UP
from rlfuse.rewards.workers.reward_worker import Memory, Source, pack, unpack
from rlfuse.samples import RewardFailure

TOKEN = "RLFUSE_REWARD_TOKEN"
"""Environment variable of the token that requests must bring: in a header, or as the password of the URL."""
MOST_BYTES = 256 * 2**20
MOST_WAITING = 256
"""Requests under way that have been read; more are refused."""
MOST_CONNECTIONS = 512
MOST_UPLOADS = 128
"""Requests of one peer that are not read yet; one more ends the oldest of them."""
READ_S = 60.0
IDLE_S = 60.0


class PayloadError(ValueError):
    """A request is not what the service takes. The message says what is."""


def main(argv: Sequence[str]) -> None:
    """Serve until interrupted. Raises RewardError."""
    arguments = _parser().parse_args(argv)
    for name in ("timeout", "workers", "memory_mb"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise RewardError(f"--{name.replace('_', '-')} {value}: must be above 0")
    token = os.environ.get(TOKEN) or None
    if token is None and not _all_loopback(arguments.host):
        raise RewardError(
            f"--host {arguments.host}: reachable from other machines, which requires a token. Set {TOKEN} to a long "
            "random string, or listen on 127.0.0.1."
        )
    kwargs = _kwargs(arguments.kwargs)
    service = Service(arguments.function, arguments.workers, arguments.timeout, arguments.memory_mb, kwargs, token)
    try:
        asyncio.run(_serve(service, arguments.host, arguments.port))
    except OSError as error:
        raise RewardError(
            f"--host {arguments.host} --port {arguments.port}: can't listen there ({error}); choose another port"
        ) from error


async def _serve(service: Service, host: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = service.runner()
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        where, user = f"{host}:{port}/get_reward", f":${{oc.env:{TOKEN}}}@" if service.token else ""
        print(
            f'serving {service.name} at http://{where}\nin a job: reward.functions=["http://{user}{where}"]', flush=True
        )
        await stopped.wait()
    finally:
        await runner.cleanup()
        await service.close()


def _all_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ip_address(entry[4][0]).is_loopback for entry in found)


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine by a name that no one else can give to it."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    serve = argparse.ArgumentParser(prog="rlfuse reward serve", description="A reward function as an HTTP service.")
    serve.add_argument("function", help="path/file.py:function, package.module:function or judge")
    serve.add_argument("--kwargs", default="{}", help="its arguments, as in an entry's kwargs: a JSON object")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine only)")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--workers", type=int, default=1, help="processes that run the function (%(default)s)")
    serve.add_argument("--timeout", type=float, default=30.0, help="most seconds for one request (%(default)s)")
    serve.add_argument("--memory-mb", type=int, help="MiB that a process may allocate once it has loaded the function")
    return serve


def _kwargs(given: str) -> dict[str, Any]:
    try:
        kwargs = json.loads(given)
    except ValueError as error:
        raise RewardError(f"--kwargs {given}: is no JSON ({error})") from None
    if not isinstance(kwargs, dict):
        raise RewardError(f'--kwargs {given}: has to be a JSON object, as {{"model": "my_judge"}}')
    return kwargs


class Service:
    """HTTP service of one reward function: POST scores, GET describes. Workers start its model."""

    def __init__(
        self,
        function: Any,
        workers: int = 1,
        timeout_s: float = 30.0,
        memory_mb: int | None = None,
        kwargs: dict[str, Any] | None = None,
        token: str | None = None,
    ):
        loaded = load_function(function, kwargs)
        restore_child_signals()
        self.name, self.shape, self.token = loaded.name, loaded.shape, token
        self._timeout_s = timeout_s
        self._processes = _Processes(pack(loaded), workers, memory_mb)
        self._waiting = 0
        self._uploads: dict[str | None, dict[asyncio.Timeout, None]] = defaultdict(dict)

    def runner(self) -> web.ServerRunner:
        """Return what listens, once it is set up. Called in the event loop."""
        return web.ServerRunner(_Server(self.answer, keepalive_timeout=IDLE_S, lingering_time=1.0, access_log=None))

    async def close(self) -> None:
        self._processes.ended.set()
        await asyncio.to_thread(_end, self._processes.pool)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if refusal := _refused(request, self.token):
            return refusal
        if request.method != "POST":
            return web.json_response({"function": self.name, "shape": self.shape})
        try:
            items = _items(parse_json(await self._read(request)))
        except TimeoutError:
            return _refusal(408, f"the request took longer than {READ_S:g} s to send, or {MOST_UPLOADS} are unfinished")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"the request has more than {MOST_BYTES >> 20} MiB; send fewer samples")
        except ValueError as error:
            return _refusal(400, str(error))
        if self._waiting >= MOST_WAITING:
            return _refusal(503, f"busy: {MOST_WAITING} requests are under way; try again later")
        self._waiting += 1
        try:
            return _answer(await self._processes.outcomes(items, self._timeout_s))
        finally:
            self._waiting -= 1

    async def _read(self, request: web.BaseRequest) -> bytes:
        """Return the body; TimeoutError after READ_S, or if the same peer sends MOST_UPLOADS newer ones."""
        uploads = self._uploads[request.remote]
        if len(uploads) >= MOST_UPLOADS:
            oldest = next(iter(uploads))
            del uploads[oldest]
            oldest.reschedule(0)
        try:
            async with asyncio.timeout(READ_S) as limit:
                uploads[limit] = None
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0
                return await request.clone(client_max_size=MOST_BYTES).read()
        finally:
            uploads.pop(limit, None)
            if not uploads and self._uploads.get(request.remote) is uploads:
                del self._uploads[request.remote]


class _Server(web.Server):
    """Closes connections of a peer that has MOST_CONNECTIONS already."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._peers: dict[Any, str] = {}
        self._counts: Counter[str] = Counter()

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        peer = self._peers[handler] = str((transport.get_extra_info("peername") or [""])[0])
        self._counts[peer] += 1
        if self._counts[peer] > MOST_CONNECTIONS:
            transport.write(b"HTTP/1.1 503 Too many connections\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            transport.close()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._counts -= Counter([self._peers.pop(handler)])


def _refused(request: web.BaseRequest, token: str | None) -> web.Response | None:
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    if token is not None and not _brings(request.headers.get("Authorization", ""), token):
        return _refusal(401, f"no valid token; send `Authorization: Bearer ${TOKEN}`, or http://:${TOKEN}@host as URL")
    if token is None and not _is_loopback(host):
        return _refusal(403, f"Host {host!r} is not this machine; send requests to localhost, or set {TOKEN}")
    if origin is not None and origin.partition("://")[2] != host:
        return _refusal(403, f"Origin {origin!r} is a web page of another server; call the service from a program")
    if request.method not in ("GET", "HEAD", "POST"):
        return _refusal(405, f"{request.method}: POST samples, or GET the name of the function")
    if request.method == "POST" and request.content_type != "application/json":
        return _refusal(415, f"Content-Type {request.content_type!r}: must be application/json")
    return None


def _brings(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    sent = given.strip().encode()
    if scheme.lower() == "basic":
        try:
            sent = base64.b64decode(sent).partition(b":")[2]
        except ValueError:
            return False
    return scheme.lower() in ("basic", "bearer") and hmac.compare_digest(sent, token.encode())


def _items(payload: Any) -> list[Item]:
    form = '{"query": [prompt + response, ...], "prompts": [...], "labels": [...]}'
    if not isinstance(payload, dict) or not isinstance(payload.get("query"), list):
        raise PayloadError(f"the request has no list `query`; it has to be {form}")
    queries, prompts = payload["query"], payload.get("prompts")
    columns = {name: value for name, value in payload.items() if isinstance(value, list) and len(value) == len(queries)}
    if not isinstance(prompts, list) or "prompts" not in columns:
        raise PayloadError(
            f"the request has no list `prompts` as long as `query` ({len(queries)}); it has to be {form}"
        )
    labels = columns.get("labels", [None] * len(queries))
    if payload.get("labels") is not None and "labels" not in columns:
        raise PayloadError(f"`labels` is no list as long as `query` ({len(queries)}); it has to be {form}")
    rest = {name: value for name, value in columns.items() if name not in ("query", "prompts", "labels")}
    items = []
    for i, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True)):
        if not (isinstance(query, str) and isinstance(prompt, str) and query.startswith(prompt)):
            raise PayloadError(f"query[{i}] does not begin with prompts[{i}]; a query is the prompt and its response")
        row = {name: value[i] for name, value in rest.items()}
        items.append(item_of_row({**row, "prompt": prompt, "response": query[len(prompt) :], "ground_truth": label}, i))
    return items


class _Processes:
    """The processes that run the function; pebble closes its pool after an idle worker dies, so it is recreated
    once."""

    def __init__(self, source: Source, workers: int, memory_mb: int | None):
        self.source, self._workers = source, workers
        self._start = partial(
            ProcessPool, workers, initializer=_begin, initargs=(source, memory_mb), context=PoolContext()
        )
        self.pool, self.ended = self._start(), threading.Event()
        kill_stopped_workers(self.ended)

    async def outcomes(self, items: list[Item], timeout_s: float) -> list[Outcome]:
        """Score the samples in a process; again in another where the first had no memory left from earlier requests."""
        name, broken, killed = self.source.name, False, False
        for _ in range(self._workers + 1):
            pool = self.pool
            try:
                return await asyncio.wrap_future(pool.schedule(_score, (items, timeout_s), timeout=timeout_s))
            except TimeoutError:
                failure = timed_out(name, timeout_s)
                break
            except ProcessExpired as error:
                failure = RewardFailure(name, f"the process of {name} ended (exit code {error.exitcode})")
                if error.exitcode != USED_UP and (killed or error.exitcode != -signal.SIGKILL):
                    break
                killed = killed or error.exitcode != USED_UP
            except (RuntimeError, BrokenProcessPool) as error:
                if pool is self.pool:  # the first of several requests that were under way in it
                    self.pool = self._start()
                    await asyncio.to_thread(_end, pool)
                failure = RewardFailure(name, f"{name} can't be run ({headline(error)}); was its file changed?")
                if broken:  # the function could not be loaded again
                    break
                broken = True
        return [failure] * len(items)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join(10)


def _answer(outcomes: list[Outcome]) -> web.Response:
    failures = []
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, RewardFailure):
            failures.append({"index": i, "message": outcome.message, "traceback": outcome.traceback})
        elif outcome.value is None:
            why = "the function does not apply to this sample (None)"
            failures.append({"index": i, "message": why, "traceback": ""})
    if failures:
        first = failures[0]
        count = f"{len(failures)} of {len(outcomes)} samples have no reward"
        words = f"{count}; sample {first['index']}: {first['message']}\n{first['traceback']}"
        return _refusal(500, words.rstrip(), failures=failures)
    rewards = [outcome.value for outcome in outcomes]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.extras)
    logs = {name: [outcome.extras.get(name) for outcome in outcomes] for name in names}
    return web.json_response({"rewards": rewards, "scores": rewards, "extra_logs": logs})


def _refusal(status: int, words: str, **more: Any) -> web.Response:
    return web.json_response({"error": words, **more}, status=status)


_function: RewardFunction
_memory: Memory
_is_fresh = True


def _begin(source: Source, memory_mb: int | None) -> None:
    global _function, _memory
    end_with_parent()
    _function = unpack(source)
    if _function.start is not None:
        _function.start()
    _memory = Memory(memory_mb)


def _score(items: list[Item], timeout_s: float) -> list[Outcome]:
    global _is_fresh
    outcomes = _function.score(items, timeout_s)
    if not _is_fresh and not _function.is_model and _memory.is_used_up(outcomes):
        os._exit(USED_UP)
    _is_fresh = False
    return outcomes
