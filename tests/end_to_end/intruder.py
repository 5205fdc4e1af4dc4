"""Checks which files, sockets, shared memory, processes and ports of a running job another user can access."""

import http.client
import os
import re
import socket
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
from other_user import as_other_user

METHODS = (
    "InternalKVGcsService/InternalKVGet",
    "InternalKVGcsService/InternalKVPut",
    "JobInfoGcsService/AddJob",
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/RequestWorkerLease",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
    "CoreWorkerService/GetCoreWorkerStats",
    "ReporterService/CpuProfiling",
    "LogService/ListLogs",
)
"""Methods of Ray's servers by which an unauthenticated client could read or run something."""
REQUESTS = (("POST", "/api/job_agent/jobs/"), ("POST", "/get_or_create_runtime_env"), ("GET", "/metrics"))
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
STORE = bytes([0]) + 0x3C85F7CE.to_bytes(4, "little") + bytes([13]) + bytes(4)
"""Request to torch's TCPStore: validation and ping."""
GLOO = re.compile("TrainerRank|EncoderRank|EngineCore")
"""Processes with Gloo sockets, which stay silent because all their peers are connected already."""
"127.0.0.1".encode("idna")  # loads the codec that sockets need, which another user may be unable to import
ANSWER_S, SILENT_S = 60.0, 3.0
INSTALLED = (
    "/usr/",
    "/lib/",
    "/lib64/",
    "/etc/",
    "/proc/",
    "/sys/",
    "/dev/null",
    "/dev/urandom",
    "/dev/pts/",
    "/dev/tty",
)


def reached(processes, shared):
    """Return a line for everything that another user can read, replace or connect to; needs root, else warns.

    Files of the installation and of `shared` may be readable; the parents of `shared` are opened to all users.
    """
    if os.geteuid() != 0:
        warnings.warn("access by other users is not tested: only root can switch to another user", stacklevel=2)
        return []
    for folder in (shared, *shared.parents[:2]):
        folder.chmod(0o755)
    paths, sockets, ports = set(), set(), defaultdict(set)
    names = {line.split()[6]: line.split()[7] for line in _lines("/proc/net/unix") if len(line.split()) > 7}
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    host = each.laddr.ip.removeprefix("::ffff:")
                    ports["127.0.0.1" if host in ("::", "0.0.0.0") else host, each.laddr.port].add(process.name())
            opened = [os.readlink(entry) for entry in _entries(f"/proc/{process.pid}/fd")]
            sockets |= {names[each[8:-1]] for each in opened if each.startswith("socket:[") and each[8:-1] in names}
            mapped = [line.split(maxsplit=5)[5] for line in _lines(f"/proc/{process.pid}/maps") if line.count("/")]
            paths |= {each for each in (*opened, *mapped) if each.startswith("/") and not each.endswith(" (deleted)")}
    private = {folder for path in paths | sockets if (folder := _private(path))}
    paths |= {str(path) for folder in private for path in folder.rglob("*")}
    pids = [process.pid for process in processes]
    wrong = as_other_user(lambda: [*_files(paths, shared), *_sockets(sockets), *_memory(pids)])
    return wrong + as_other_user(lambda: _ports(ports))


def _lines(path):
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _entries(folder):
    with suppress(OSError):
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    return []


def _private(path):
    """Return the run's folder for temporary files or shared memory that holds `path`, or None."""
    found = re.match(r"(/dev/shm|/tmp|.*?)/rlfuse-(run|kv|weights|embeddings)-\w+", path)
    return found and Path(found[0])


def _files(paths, shared):
    """Yield a line for each file that can be written, replaced or, unless shared or installed, read."""
    for path in sorted(paths):
        if not os.path.lexists(path) or path.startswith("/dev/null"):
            continue
        folder = os.path.dirname(path)
        if os.access(path, os.W_OK) and not path.startswith(("/dev/", "/proc/")):
            yield f"{path} can be written"
        if os.access(folder, os.W_OK | os.X_OK) and not os.stat(folder).st_mode & 0o1000:
            yield f"{path} can be replaced"
        known = path.startswith((*INSTALLED, sys.prefix, sys.base_prefix))
        if os.access(path, os.R_OK) and not known and not path.startswith(f"{shared}/"):
            yield f"{path} can be read"


def _sockets(paths):
    for path in sorted(paths):
        with socket.socket(socket.AF_UNIX) as client, suppress(PermissionError, FileNotFoundError):
            client.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
            yield f"{path} can be connected to"


def _memory(pids):
    for path in (f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "fd")):
        with suppress(OSError):
            os.listdir(path) if path.endswith("fd") else os.close(os.open(path, os.O_RDONLY))
            yield f"{path} can be read"


def _ports(ports):
    """Return a line for each port that answers an unauthenticated client."""
    with ThreadPoolExecutor(32) as pool:
        answers = zip(ports.items(), pool.map(_answer, ports, ports.values()), strict=True)
        return [f"{port} of {sorted(names)}: {answer}" for (port, names), answer in answers if answer]


def _answer(port, names):
    """Return what a server of these processes answers without a token; None if it answers nothing."""
    greeting = _reply(port, HTTP2)
    if greeting.startswith(b"HTTP/1"):
        codes = {request: _status(port, *request) for request in REQUESTS}
        return f"HTTP {codes}" if not set(codes.values()) <= {401, 403, 404, 405} else None
    if greeting[3:4] == b"\x04":
        with grpc.insecure_channel("{}:{}".format(*port)) as channel:
            codes = {method: _code(channel, method) for method in METHODS}
        refused = grpc.StatusCode.UNAUTHENTICATED in codes.values()
        others = set(codes.values()) - {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
        return f"gRPC {codes}" if others or not refused else None
    if greeting:
        return repr(greeting)
    if _reply(port, STORE):
        return "torch's TCPStore"
    return None if any(map(GLOO.search, names)) else "does not answer"


def _reply(port, words):
    with suppress(OSError), socket.create_connection(port, SILENT_S) as client:
        client.sendall(words)
        return client.recv(64)
    return b""


def _status(port, verb, path):
    connection = http.client.HTTPConnection(*port, timeout=ANSWER_S)
    connection.request(verb, path, body="{}", headers={"Content-Type": "application/json"})
    return connection.getresponse().status


def _code(channel, method):
    try:
        channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=ANSWER_S)
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
