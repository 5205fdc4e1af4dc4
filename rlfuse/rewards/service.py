"""`rlfuse reward serve path/file.py:function`: a reward behind HTTP, with OpenRLHF's payload (see `http_service`).

Role: called by `rlfuse reward`; `application` is the service itself. The function is loaded as in a job, so that one
file serves a notebook, a job and other trainers.
Invariants:
- a reward that failed is an answer of status 500 with the function's message and traceback, never a number: then no
  sample of the request has one, and the caller may ask again, one by one;
- all is bounded: a request's size, the requests that wait, and the seconds and memory of a call, whose process is
  replaced when it exceeds them.

    request --(busy: 503)--> waiting -> one of the worker processes, for at most --timeout seconds -> answer
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from aiohttp import web
from pebble import ProcessExpired, ProcessPool

from rlfuse.cluster.child_processes import end_with_parent, kill_stopped_workers, restore_child_signals
from rlfuse.config.own_errors import headline
from rlfuse.errors import RewardError
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import Item, Outcome, item_of_row
from rlfuse.rewards.api.shapes import RewardFunction, timed_out
from rlfuse.rewards.workers.reward_worker import Memory, Source, pack, unpack
from rlfuse.samples import RewardFailure

MOST_BYTES = 256 * 2**20
MOST_WAITING = 256
"""Requests under way, the waiting ones included; more are told to come back."""
USED_UP = 76
"""Exit status of a process whose memory is held by what earlier requests left."""


class PayloadError(ValueError):
    """A request is not what the service takes. The message says what is."""


def main(argv: Sequence[str]) -> None:
    """Serve until interrupted. Raises RewardError."""
    arguments = _parser().parse_args(argv)
    for name in ("timeout", "workers", "memory_mb"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise RewardError(f"--{name.replace('_', '-')} {value}: must be above 0")
    kwargs = _kwargs(arguments.kwargs)
    app = application(arguments.function, arguments.workers, arguments.timeout, arguments.memory_mb, kwargs)
    where = f"http://{arguments.host}:{arguments.port}/get_reward"
    print(f"serving {arguments.function} at {where}\nin a job: reward.functions=[{where}]", flush=True)
    try:
        web.run_app(app, host=arguments.host, port=arguments.port, print=None, access_log=None)
    except OSError as error:
        raise RewardError(
            f"--host {arguments.host} --port {arguments.port}: can't listen there ({error}); choose another port"
        ) from error


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


def application(
    function: Any,
    workers: int = 1,
    timeout_s: float = 30.0,
    memory_mb: int | None = None,
    kwargs: dict[str, Any] | None = None,
) -> web.Application:
    """The service of one reward function, given as in reward.functions: POST scores, GET says what is served.

    A model is started by each worker, for which the first requests wait.
    """
    loaded = load_function(function, kwargs)
    restore_child_signals()
    processes = _Processes(pack(loaded), workers, memory_mb)
    state = {"under way": 0}

    async def score(request: web.Request) -> web.Response:
        if state["under way"] >= MOST_WAITING:
            return _refusal(503, f"busy: {MOST_WAITING} requests are under way; come back later")
        state["under way"] += 1
        try:
            items = _items(await request.json())
            return _answer(await processes.outcomes(items, timeout_s))
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"the request has more than {MOST_BYTES >> 20} MiB; send fewer samples")
        except (PayloadError, ValueError) as error:  # ValueError: no JSON
            return _refusal(400, str(error))
        finally:
            state["under way"] -= 1

    async def show(_: web.Request) -> web.Response:
        return web.json_response({"function": loaded.name, "shape": loaded.shape})

    async def stop(_: web.Application) -> None:
        processes.ended.set()
        await asyncio.to_thread(_end, processes.pool)

    app = web.Application(client_max_size=MOST_BYTES)
    app.add_routes([web.post("/{path:.*}", score), web.get("/{path:.*}", show)])
    app.on_cleanup.append(stop)
    return app


def _items(payload: Any) -> list[Item]:
    """Return the samples of a request; PayloadError says what is wrong with it."""
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
    """The processes that run the function.

    A process that ends while the pool knows of no task that it runs, idle or before the pool has read that it took
    one, is to pebble one that can't start, and the pool is closed for good: then another is begun, and asked once.
    """

    def __init__(self, source: Source, workers: int, memory_mb: int | None):
        self.source, self._workers = source, workers
        self._start = partial(
            ProcessPool,
            workers,
            initializer=_begin,
            initargs=(source, memory_mb),
            context=multiprocessing.get_context("spawn"),
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


# In a worker process -------------------------------------------------------------------------------------------------


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
