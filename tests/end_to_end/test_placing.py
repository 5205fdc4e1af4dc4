"""Slots on clusters of different nodes, forked workers, access by other users, and messages on dead workers."""

import json
import multiprocessing
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlfuse.cluster import forked_worker, scratch
from rlfuse.cluster.rank_store import STORE, StoreServer
from rlfuse.cluster.remote import call
from rlfuse.cluster.worker_environment import worker_environment
from rlfuse.engines.vllm.setup import rollout_env
from rlfuse.engines.weights.staging import WeightStaging
from rlfuse.errors import WorkerLost
from rlfuse.rewards.workers.reward_worker import RewardWorker
from rlfuse.video.cache import EmbeddingCache


def test_a_private_cluster_leaves_the_agent_port_of_ray_start_free(ray_cluster):
    node = ray._private.worker._global_node
    assert node.dashboard_agent_listen_port not in (
        None,
        ray._private.ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT,
    )


def test_a_job_on_a_head_without_gpus_uses_the_gpus_of_the_cluster():
    command = [sys.executable, Path(__file__).with_name("mixed_nodes.py")]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    authenticated = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a1b2c3d4" * 8}
    done = subprocess.run(command, env=plain | authenticated, capture_output=True, text=True, timeout=240)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 3, done.stdout + done.stderr
    found = {name: rest for name, *rest in lines}
    device, message, gpus = found["one GPU"]
    assert (device, gpus) == ("cuda", [1.0])
    assert message.startswith("GPUs of ") and "cluster.device=auto, and 1 of 2 Ray nodes have GPUs" in message
    refused = found["two GPUs"][1]
    assert "1 of 1 slot, 1 of 1 CPU, 0 of 0 GPU" in refused and "cluster.device=cpu" in refused
    assert found["CPUs"][0] == "cpu" and sorted(found["CPUs"][2]) == [0, 1]


def test_ranks_of_several_nodes_rendezvous_through_ray_without_a_torch_port(ray_cluster):
    class Meeting(StoreServer):
        def join(self, rank, world, first):
            limit = timedelta(seconds=120)
            store = self.use_store(rank, first, limit)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)

        def exchange(self, rank, world):
            pair, seen = dist.new_group([0, world - 1]), torch.tensor([float(rank)])
            dist.all_reduce(seen)
            if rank in (0, world - 1):
                dist.all_reduce(seen, group=pair)
            added = self.store.add("calls", 1)
            self.store.set(f"rank {rank}", b"\xff\x00")
            return seen.item(), added, self.store.get(f"rank {world - 1 - rank}")

        def wait_in_vain(self, first):
            self.use_store(1, first, timedelta(seconds=0.3)).wait(["rank 0", "rank 7"])

    environment = {"env_vars": worker_environment("cpu") | {"GLOO_SOCKET_IFNAME": "lo"}}
    remote = ray.remote(concurrency_groups={STORE: 1})(Meeting).options(num_cpus=0, runtime_env=environment)
    ranks = [remote.remote() for _ in range(3)]
    ray.get(ranks[0].open_store.remote(), timeout=240)
    ray.get([rank.join.remote(i, 3, ranks[0]) for i, rank in enumerate(ranks)], timeout=240)
    found = ray.get([rank.exchange.remote(i, 3) for i, rank in enumerate(ranks)], timeout=240)
    assert [seen for seen, _, _ in found] == [6.0, 3.0, 6.0]
    assert sorted(added for _, added, _ in found) == [1, 2, 3]
    assert {value for _, _, value in found} == {b"\xff\x00"}
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the other ranks to set rank 0, rank 7"):
        ray.get(ranks[1].wait_in_vain.remote(ranks[0]), timeout=240)
    for rank in ranks:
        ray.kill(rank)


def test_a_private_ray_cluster_has_no_unused_processes(ray_cluster):
    commands = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # processes may end meanwhile
            commands.append(" ".join(process.cmdline()))
    assert any("/raylet " in command for command in commands), commands
    assert not [each for each in commands if re.search(r"log_monitor|monitor\.py|dashboard\.py|ray-dashboard", each)]


def test_processes_without_computation_do_not_import_torch(ray_cluster, tmp_path):
    """The import takes two seconds and 200 MB in each process that is not forked from the fork server.

    The server refuses to fork workers whose environment could change the imported libraries.
    """
    kinds = {WeightStaging: (), EmbeddingCache: (1 << 20, None, None, str(tmp_path)), RewardWorker: ("reward/0", (), 1)}
    options = {"num_cpus": 0, "runtime_env": {"env_vars": worker_environment("cpu") | {"PYTHONHASHSEED": "1"}}}
    actors = [ray.remote(kind).options(**options).remote(*given) for kind, given in kinds.items()]
    loaded = ray.get([actor.__ray_call__.remote(lambda _: "torch" in sys.modules) for actor in actors], timeout=240)
    for actor in actors:
        ray.kill(actor)
    assert loaded == [False] * 3


def test_forked_workers_equal_those_that_ray_would_start(ray_cluster):
    class Facts:
        def __init__(self):
            self.imported = {"torch", "deepspeed", "vllm.v1.engine.async_llm"} <= sys.modules.keys()

        def own(self):
            import numpy as np
            import torch

            chance = np.random.random(), torch.rand(1).item(), random.random()
            facts = {"imported": self.imported, "chance": chance, "pid": os.getpid(), "parent": os.getppid()}
            return facts | {"threads": psutil.Process(os.getppid()).num_threads()}

        def shared(self):
            """Return what Ray sets up in any worker, forked or not."""
            lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            facts = {name: lines[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask")}
            facts |= {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name}
            facts |= {
                "session": os.getsid(0),
                "group": os.getpgid(0) - os.getpid(),
                "nice": os.nice(0),
                "cores": os.sched_getaffinity(0),
            }
            facts |= {"blame": Path("/proc/self/oom_score_adj").read_text(), "folder": os.getcwd()}
            facts["path"] = [each for each in sys.path if not each.endswith("_vendor")]  # setuptools adds entries
            return facts | {"script": sys.argv[0], "flags": str(sys.flags), "main": sys.modules["__main__"].__file__}

    made = []
    for variables in ({"MINE": "1"}, {"MINE": "1"}, {"PYTHONHASHSEED": "random"}):  # which the server refuses to fork
        options = {"num_cpus": 0, "runtime_env": {"env_vars": worker_environment("cpu") | variables}}
        made.append(ray.remote(Facts).options(**options).remote())
    one, other, ray_s = ray.get([each.own.remote() for each in made], timeout=240)
    *forks, expected = ray.get([each.shared.remote() for each in made], timeout=240)
    for actor in made:
        ray.kill(actor)
    assert [each["imported"] for each in (one, other, ray_s)] == [True, True, False]
    assert "rlfuse.cluster.fork_server" in psutil.Process(one["parent"]).cmdline() and one["threads"] == 1
    assert one["pid"] != other["pid"]
    assert [a != b for a, b in zip(one["chance"], other["chance"], strict=True)] == [True, True, True]
    assert forks == [expected, expected]


CALLED = """
import json, os, resource, sys
print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
"""


@pytest.mark.parametrize(
    ("variables", "flags", "context", "maker"),
    [
        ({}, [], {"env_vars": {"MINE": "${TWO}s", "NEXT": "${MINE}${NONE}"}}, "default_worker.py"),
        ({"PYTHONHASHSEED": "1"}, [], {}, "setup_worker.py"),  # which may change the imported libraries
        ({"PYTHONNOUSERSITE": "1"}, ["-s"], {"env_vars": {"TWO": "${TWO}s"}}, "setup_worker.py"),
        ({}, ["-s"], {}, "setup_worker.py"),
        ({}, [], {"py_executable": "/usr/bin/python3"}, "setup_worker.py"),
        ({forked_worker.SERVER: "/nowhere"}, [], {}, "setup_worker.py"),
    ],
)
def test_a_worker_is_forked_only_if_it_equals_the_one_that_ray_would_start(
    ray_cluster, tmp_path, variables, flags, context, maker
):
    for name in ("default_worker.py", "setup_worker.py"):  # both are in the same folder of Ray
        (tmp_path / name).write_text(CALLED)
    arguments = [*flags, str(tmp_path / "default_worker.py"), "--port=1"]
    arguments += [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON"]
    limited = ["bash", "-c", 'ulimit -Sn 500; exec "$@"', "bash", sys.executable, forked_worker.__file__, *arguments]
    environment = os.environ | worker_environment("cpu") | {"TWO": "two"} | variables
    done = subprocess.run(limited, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    words, folder, found, open_files = json.loads(done.stdout)
    assert Path(words[0]).name == maker and (folder, open_files) == (str(tmp_path), 500)
    if maker == "default_worker.py":
        assert words[1:] == ["--port=1"] and (found["MINE"], found["NEXT"]) == ("twos", "twos")
    else:
        assert words[1:] == arguments and "MINE" not in found and found["TWO"] == "two"


def test_the_fork_server_accepts_the_no_user_site_flag_only_if_it_was_started_with_it(monkeypatch):
    """Ray passes interpreter flags before the name of its script."""
    arguments = ["-s", "/ray/default_worker.py", "--language=PYTHON"]
    monkeypatch.setattr(forked_worker.sys, "flags", SimpleNamespace(no_user_site=1))
    assert forked_worker.request(arguments)["words"] == ["/ray/default_worker.py"]
    assert forked_worker.request(["-S", *arguments]) is None, "other interpreter flags are accepted"


SERVER = """
import sys
from pathlib import Path
from rlfuse.cluster import fork_server
fork_server._forget = lambda: None  # the libraries are not imported here
fork_server.main(Path(sys.argv[1]), "json")
"""


def test_a_request_that_has_timed_out_is_not_forked(tmp_path, monkeypatch):
    """After a timeout Ray's script starts the worker, which must not be started twice."""
    script, path = tmp_path / "default_worker.py", tmp_path / "fork_server"
    script.write_text("import time\ntime.sleep(600)")
    wanted = {"words": [str(script)], "folder": str(tmp_path)}
    wanted |= {"oom_score_adj": "0", "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)}
    monkeypatch.setenv(forked_worker.SERVER, str(path))
    with subprocess.Popen([sys.executable, "-c", SERVER, path], stdin=subprocess.PIPE) as process:
        server, deadline = psutil.Process(process.pid), time.monotonic() + 240
        try:
            while not forked_worker.forked(wanted):  # the server is not listening yet
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server.suspend()
            with monkeypatch.context() as patched:
                patched.setattr(forked_worker, "ANSWER_S", 0.05)
                assert not forked_worker.forked(wanted)
            server.resume()
            assert forked_worker.forked(wanted) and len(server.children()) == 2
        finally:
            for each in (*server.children(), server):
                each.kill()


ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
_, folder, *paths = sys.argv
for action, *arguments in [(os.listdir, folder), (os.rename, folder, folder + "-2"), (open, folder + "/new", "w"), *(
    (socket.socket(socket.AF_UNIX).connect, path) for path in paths
)]:
    try:
        action(*arguments)
    except PermissionError:
        continue
    sys.exit(f"another user could do {action} {arguments}")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_reach_the_folder_and_the_sockets_of_a_run(ray_cluster):
    folder = scratch.of_this_process()
    bound = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    sockets = [path for path in bound if path.startswith(str(folder))]
    assert {Path(path).name for path in sockets} >= {"fork_server", "plasma_store", "raylet"}
    subprocess.run([sys.executable, "-c", ANOTHER_USER, folder, *sockets], check=True, timeout=240)


FROM_ANOTHER_USER = """
import json, os, sys
from rlfuse.cluster import forked_worker
os.setuid(65534)
wanted = json.loads(sys.argv[1])
assert not forked_worker.forked(wanted), "it sent its environment to a server of another user"
forked_worker.peer, forked_worker.started_with = lambda _: (0, 65534), lambda _: {}
assert not forked_worker.forked(wanted), "the server of another user started its worker"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_servers_and_workers_refuse_another_user(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = {"words": ["/bin/none.py"], "folder": "/", "oom_score_adj": "0", "open_files": limits}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        path = Path(folder) / "fork_server"
        monkeypatch.setenv(forked_worker.SERVER, str(path))
        with subprocess.Popen([sys.executable, "-c", SERVER, path], stdin=subprocess.PIPE) as process:
            try:
                while not forked_worker.forked(wanted):  # the server may still be starting
                    assert process.poll() is None
                    time.sleep(0.05)
                path.chmod(0o777)
                subprocess.run([sys.executable, "-c", FROM_ANOTHER_USER, json.dumps(wanted)], check=True, timeout=240)
            finally:
                process.kill()


class Worker:
    def where(self):
        return ray.get_runtime_context().get_node_id()


def engine_process(answer, group, environment):
    """Do what vLLM's engine process does before it loads a model (`initialize_ray_cluster`, `RayExecutorV2`)."""
    ray.init(runtime_env=environment)
    node = placement_group_table(group)["bundles_to_node_id"][1]
    there = PlacementGroupSchedulingStrategy(group, 1)
    worker = ray.remote(Worker).options(num_cpus=0, scheduling_strategy=there, runtime_env=environment).remote()
    answer.put((node, ray.get(worker.where.remote(), timeout=120)))


class Front:
    """Stand-in for `RolloutWorker` on a GPU, whose engine spans two slots."""

    def start(self):
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # as vLLM does before spawning
        spawning = multiprocessing.get_context("spawn")
        answer, environment = spawning.Queue(), ray.get_runtime_context().runtime_env
        process = spawning.Process(target=engine_process, args=(answer, get_current_placement_group(), environment))
        process.start()
        try:
            return answer.get(timeout=180)
        finally:
            process.kill()


def test_the_process_of_an_engine_over_several_gpus_joins_the_private_ray_cluster(slots):
    """The cluster listens on loopback only; the session's slots stand for GPUs on which the process places workers."""
    options = replace(slots, device="cuda").engine_options(
        0, 2, rollout_env("cuda", slots=range(2)) | {"PYTHONPATH": os.path.dirname(__file__)}
    )
    front = ray.remote(Front).options(**options).remote()
    planned, placed = ray.get(front.start.remote(), timeout=240)
    assert planned == placed == slots.nodes[0].id
    ray.kill(front)


TIMED_OUT = (
    b"[rank1]:[E1122 21:09:11.522 ProcessGroupNCCL.cpp:688] [Rank 1] Watchdog caught collective operation timeout: "
    b"WorkNCCL(SeqNum=412, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1440000) ran for 1440029 milliseconds\n"
)
UNHANDLED = (
    b"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  NCCL error in: x.hpp:3\n"
)


@ray.remote(num_cpus=0)
class Rank:
    def end(self, words):
        os.write(2, words)
        os.abort() if words else os._exit(1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (TIMED_OUT, ["waiting 1440 s", "collective 412 (ALLREDUCE)", "fr_trace", "raise cluster.timeout_s"]),
        (UNHANDLED, ["it crashed: what():  NCCL error in: x.hpp:3.", "logs: Ray's of it, /", ".err"]),
        (b"", ["killed by signal 9 (SIGKILL); the sender is unknown", "Free memory now", "logs: Ray's of it, /"]),
    ],
)
async def test_a_worker_that_crashed_is_reported_with_its_last_output(ray_cluster, words, expected):
    with pytest.raises(WorkerLost) as caught:
        await call(Rank.remote().end.remote(words), "trainer/1", "update the actor", 240)
    assert all(each in str(caught.value) for each in expected), str(caught.value)
