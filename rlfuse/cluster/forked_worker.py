"""Replace Ray's `setup_worker.py`: request the worker from the fork server, or run Ray's own script.

It ends when the worker is running, after reporting its process id to the raylet. Imports nothing that takes time.
"""

import argparse
import json
import os
import re
import resource
import socket
import struct
import sys

SERVER = "RLFUSE_FORK_SERVER"
"""Environment variable: the socket on which the fork server listens."""
ANSWER_S = 120.0
FORKING, FORKED = b"forking ", b"forked"
"""Replies of the server. FORKING is sent before the fork, so that no worker is forked for a client that gave up and ran
Ray's script itself."""


def request(arguments: list[str]) -> dict | None:
    """Return the description of the worker; None if it must not be forked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, words = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context or "{}")
    own = ("command_prefix", "override_worker_entrypoint")
    executable = context.get("py_executable") or sys.executable
    if sys.flags.no_user_site and words[0] == "-s":  # set by PYTHONNOUSERSITE, as in the server
        del words[0]
    plain = known.language == "PYTHON" and executable == sys.executable and not words[0].startswith("-")
    if not plain or any(context.get(name) for name in own):
        return None
    for name, value in (context.get("env_vars") or {}).items():  # as Ray does: a value may reference earlier variables
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    with open("/proc/self/oom_score_adj") as file:
        blame = file.read()
    return {
        "words": words,
        "folder": os.getcwd(),
        "oom_score_adj": blame,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def started_with(pid: int) -> dict[str, str]:
    """Return the environment with which a process of this user was started."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (os.fsdecode(pair).partition("=") for pair in file.read().split(b"\0") if pair)
    return {name: value for name, _, value in pairs}


def forked(spec: dict) -> bool:
    """Request the worker from the server; return whether it was forked. Only differing variables are sent."""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(ANSWER_S)
            server.connect(os.environ[SERVER])
            pid, user = peer(server)
            if user != os.getuid():
                return False
            has = started_with(pid)
            changes = dict(os.environ.items() - has.items()) | dict.fromkeys(has.keys() - os.environ.keys())
            socket.send_fds(server, [b"\n"], [0, 1, 2])
            server.sendall(json.dumps(spec | {"environment": changes}).encode())
            server.shutdown(socket.SHUT_WR)
            return server.makefile("rb").read() == FORKING + FORKED
    except OSError:  # no server, or it has ended
        return False


def main(arguments: list[str]) -> None:
    """Return if a worker was forked; otherwise replace this process by Ray's own script."""
    environment = dict(os.environ)
    spec = request(arguments) if SERVER in environment else None
    if spec is None or not forked(spec):
        worker = next(word for word in arguments if not word.startswith("-"))
        script = os.path.join(os.path.dirname(worker), "setup_worker.py")  # in the folder of Ray's default_worker.py
        os.execve(sys.executable, [sys.executable, script, *arguments], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
