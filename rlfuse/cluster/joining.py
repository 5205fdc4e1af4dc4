"""Connect to a running Ray cluster within CONNECT_S and HANDSHAKE_S; `ray.init` alone retries for minutes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar
from unittest import mock

import ray
from ray._private import services
from ray._raylet import GcsClient
from ray.exceptions import RayError
from ray.job_config import JobConfig

from rlfuse.cluster import watchdog
from rlfuse.cluster.worker_environment import job_environment
from rlfuse.errors import EngineError
from rlfuse.user_folders import home

CONNECT_S, HANDSHAKE_S = 10.0, 30.0
"""Limits for the head of the cluster: to accept a connection, and to answer a request."""
T = TypeVar("T")


def join_ray(address: str) -> None:
    """Connect to a running cluster. Raises EngineError with the address and the reason."""
    environment = job_environment()
    environment["env_vars"] |= watchdog.environment()
    head = address
    protected_token()
    try:
        head = services.canonicalize_bootstrap_address_or_die(address)
        _await_head(head)
        with without_error_pages(), without_path_shadowing():
            ray.init(address=head, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    except (OSError, RayError, RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        where = "" if head == address else f", which is {head}"
        raise EngineError(
            f"Ray could not join the cluster at cluster.ray_address={address}{where} ({why}). Correct the address, "
            "start the cluster (ray start --head; on other nodes ray start --address=HEAD:6379), give its token "
            "(RAY_AUTH_TOKEN_PATH), or leave cluster.ray_address out for one node."
        ) from error


def protected_token() -> Path | None:
    """Return the user's Ray token, made readable by this user alone; EngineError if it is another's."""
    path = home() / ".ray" / "auth_token"
    if not os.path.isfile(path):
        return None
    facts = path.stat()
    if facts.st_uid != os.getuid():
        raise EngineError(
            f"{path}, the token of Ray clusters, belongs to user {facts.st_uid}, who could run code as you. Remove it, "
            "or set RAY_AUTH_TOKEN_PATH to a file that you own."
        )
    if facts.st_mode & 0o077:
        with suppress(OSError):  # of a read-only file system
            path.chmod(0o600)
    return path


def _await_head(address: str) -> None:
    """Return when a Ray head answers at host:port; OSError otherwise."""
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            socket.create_connection(services.parse_address(address), CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(f"nothing accepts connections there within {CONNECT_S:g} s: {error}") from error
        time.sleep(0.1)
    try:
        request(lambda: GcsClient(address=address)).result(HANDSHAKE_S)
    except TimeoutError as error:
        raise ConnectionError(f"what listens there did not answer as a Ray head within {HANDSHAKE_S:g} s") from error


def request(function: Callable[[], T]) -> Future[T]:
    """Call a function that queries Ray's head in a thread, since Ray's clients wait without a time limit."""
    answer = Future[T]()
    answer.set_running_or_notify_cancel()  # so that it is not cancelled with its reader

    def ask() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="head of Ray").start()
    return answer


def without_error_pages() -> AbstractContextManager:
    """Suppress Ray's long message for each dead worker; `remote` reports it briefly."""
    return mock.patch.object(ray._private.worker, "listen_error_messages", lambda *_: None)


def without_path_shadowing() -> AbstractContextManager:
    """Keep Ray from putting the driver's folder before installed packages; `prepare_worker` appends it."""
    return mock.patch.object(JobConfig, "_runtime_env_has_working_dir", lambda _: True)
