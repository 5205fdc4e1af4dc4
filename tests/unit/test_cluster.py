"""Cluster setup and failures: error messages, placement on nodes, and joining a Ray cluster."""

import asyncio
import os
import pickle
import re
import shutil
import socket
import threading
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rlfuse.application import run_command
from rlfuse.cluster import joining, placement, process_logs
from rlfuse.cluster.nodes import Node, answers, choose, device_of, lost_message
from rlfuse.cluster.remote import explain
from rlfuse.cluster.worker_environment import clear_launcher_variables
from rlfuse.config.checks import check
from rlfuse.config.declare import Effect
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.engines.trainer.micro_batch_losses import RankCall
from rlfuse.engines.vllm.setup import rollout_env
from rlfuse.errors import ConfigError, EngineError, EngineLost
from rlfuse.events import Span
from rlfuse.run.job import open_job
from rlfuse.run.resume.changes import differences
from rlfuse.tools.planning.tables import placements


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_full_shared_memory_is_reported_with_the_required_size(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 60 << 20, 4 << 20))
    with pytest.raises(EngineError, match=r"/dev/shm has 4 MiB free.*256 MiB.*--shm-size"):
        placement._need_shared_memory()


RAISED = """\x1b[36mray::Rank.update()\x1b[39m (pid=7, ip=127.0.0.1, repr=<Rank object at 0x7f>)
  File "/srv/.venv/lib/python3.11/site-packages/ray/function_manager.py", line 1, in run
    method()
  File "/srv/rlfuse/engines/trainer/trainer_rank.py", line 88, in update
    loss = user_loss(batch)
           ^^^^^^^^^^^^^^^^
  File "/home/user/loss.py", line 3, in user_loss
    return 1 / 0
           ~~^~~
  File "/srv/.venv/lib/python3.11/site-packages/torch/_tensor.py", line 9, in __rdiv__
    return self.reciprocal() * other
ZeroDivisionError: division by zero"""


def test_a_custom_exception_keeps_its_type_and_location_and_is_logged_in_full(tmp_path):
    process_logs.begin(tmp_path / "logs")
    try:
        error = RayTaskError("f", RAISED, ZeroDivisionError("division by zero"))
        text = str(explain(error, "trainer/1", "update the actor", 5))
    finally:
        process_logs.end()
    assert (
        text
        == f"""\
trainer/1 failed to update the actor: ZeroDivisionError: division by zero
  File "/srv/rlfuse/engines/trainer/trainer_rank.py", line 88, in update
    loss = user_loss(batch)
  File "/home/user/loss.py", line 3, in user_loss
    return 1 / 0
  File "/srv/.venv/lib/python3.11/site-packages/torch/_tensor.py", line 9, in __rdiv__
    return self.reciprocal() * other
logs: {tmp_path}/logs (trainer-1.log has the error)"""
    )
    assert "function_manager.py" in (log := (tmp_path / "logs" / "trainer-1.log").read_text()) and "\x1b" not in log


@pytest.mark.parametrize("kind, headline", [(ZeroDivisionError, "ZeroDivisionError: no"), (EngineError, "no")])
def test_a_failure_in_a_call_with_several_passes_names_the_pass(kind, headline):
    span = Span("values", "trainer/1", 0.0)
    with pytest.raises(kind) as found, RankCall(("ref", "critic"), "cpu").timed("critic", span):
        raise kind("no")
    error = RayTaskError("f", "tb", pickle.loads(pickle.dumps(found.value)))
    message = str(explain(error, "trainer/1", "compute log-probs of the ref and values of the critic", 5))
    assert f"{headline}\nRaised in the values pass of the critic." in message


def test_the_full_traceback_of_a_worker_is_shown_on_request(monkeypatch, capsys):
    def act():
        error = RayTaskError("f", RAISED, ZeroDivisionError("division by zero"))
        raise explain(error, "trainer/1", "update the actor", 5) from error

    for requested in ("0", "1"):
        monkeypatch.setenv("RLFUSE_TRACEBACK", requested)
        assert run_command(act) == 1
        output = capsys.readouterr().err
        assert ("function_manager.py" in output) == (requested == "1")
        assert "trainer/1 failed to update the actor: ZeroDivisionError: division by zero" in output


def test_an_engine_error_from_a_worker_is_raised_unchanged():
    """Unwrap Ray's dynamic subclass of both error types, whose text is the traceback."""
    cause = raised(EngineLost("rollout/0: out of memory; lower rollout.max_num_seqs"))
    for error in (RayTaskError("f", "tb", cause), RayTaskError("f", "tb", cause).as_instanceof_cause()):
        explained = explain(error, "rollout/0", "generate", 5)
        assert type(explained) is EngineLost and str(explained) == str(cause)


STARVED = """The actor is dead because its worker process has died. Worker exit detail: Worker exits with an exit code \
None. Traceback (most recent call last):
  File "ray.py", line 67, in wrapper
    blocks.append(bytearray(1 << 20))
MemoryError: no more
Some common causes include: many"""


@pytest.mark.parametrize(
    "error, words",
    [
        (ActorUnavailableError(STARVED, None), ["exit code None. MemoryError: no more. It is out of memory. Lower"]),
        (ActorDiedError(), ["trainer/0 died", "load", "The actor died unexpectedly", "Free memory now: "]),
        (TimeoutError(), ["trainer/0 did not load within 5 s", "cluster.timeout_s"]),
        (OSError("disk on fire"), ["trainer/0 failed to load: OSError: disk on fire"]),
    ],
)
def test_each_kind_of_failure_has_its_message(error, words):
    explained = explain(error, "trainer/0", "load", 5)
    assert isinstance(explained, EngineError)
    assert all(word in str(explained) for word in words), str(explained)


def test_tensor_parallel_engines_on_gpus_get_their_placement_bundles():
    slots = placement.Slots(group=None, count=4, device="cuda")
    options = slots.engine_options(2, 2, rollout_env("cuda", slots=range(2, 4)))
    variables = options["runtime_env"]["env_vars"]
    assert variables["VLLM_RAY_BUNDLE_INDICES"] == "2,3" and "VLLM_RAY_BUNDLE_INDICES" not in rollout_env("cuda")
    assert (options["num_gpus"], options["resources"]) == (0, {}), "the frontend reserves nothing; its workers do"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in variables, "only for a local Ray"
    assert slots.options(1, 0.5)["num_gpus"] == 0.5


def test_ranks_on_gpus_share_the_cores_of_their_node():
    nodes = tuple(Node(name, "10.0.0.1", 1, {}, {"CPU": cores}) for name, cores in (("a", 64.0), ("b", 48.0)))
    assert placement.Slots(group=None, count=16, device="cuda", nodes=nodes).threads == 6
    assert placement.Slots(group=None, count=16, device="cuda", nodes=()).threads == 1


@pytest.mark.parametrize(
    ("address", "again", "exist", "seconds"),
    [
        (None, False, False, placement.STARTING_S),
        (None, True, False, 900),
        ("auto", False, True, 900),
        ("auto", True, False, 900),
        ("auto", False, False, placement.JOINING_S),
    ],
)
def test_a_run_waits_for_occupied_slots_up_to_the_configured_timeout(address, again, exist, seconds):
    config = Config()
    config.cluster.timeout_s, config.cluster.ray_address = 900, address
    assert placement._patience(config, again, exist) == seconds


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, False) for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE")),
        *((name, False) for name in ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "PMIX_NAMESPACE", "MPI_LOCALRANKID")),
        *((name, False) for name in ("MV2_COMM_WORLD_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK")),
        *((name, False) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS")),
        *((name, False) for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "ROLE_WORLD_SIZE")),
        *((name, False) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")),
        *((name, False) for name in ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *((name, False) for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")),
        *((name, True) for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "OMPI_MCA_btl", "RANKED", "SIZE", "MY_RANK")),
        *((name, True) for name in ("NCCL_SOCKET_IFNAME", "VLLM_RAY_BUNDLE_INDICES", "RAY_ADDRESS", "DS_ACCELERATOR")),
    ],
)
def test_variables_of_an_outer_launcher_are_cleared_and_settings_are_kept(monkeypatch, name, kept):
    monkeypatch.setattr(os, "environ", {name: "3"})
    clear_launcher_variables()
    assert (name in os.environ) == kept


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{free}", "nothing accepts connections there within 0.1 s: .*refused"),
        ("ray://127.0.0.1:{free}", "Invalid address format"),
        ("no-such-host.invalid:6379", "nothing accepts connections"),
        ("127.0.0.1", "Invalid address format"),
    ],
)
def test_an_address_without_a_ray_head_fails_quickly_with_the_reason(monkeypatch, address, reason):
    monkeypatch.setattr(joining, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = address.format(free=server.getsockname()[1])
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"cluster.ray_address={re.escape(given)}.*{reason}"):
        joining.join_ray(given)
    assert time.monotonic() - began < 30


async def test_cancelling_a_request_to_the_head_raises_no_error_in_its_thread(monkeypatch):
    uncaught, release = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    answer = joining.request(lambda: release.wait(60))
    waiting = asyncio.wrap_future(answer)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.01)  # lets its callbacks run
    release.set()
    assert answer.result(60) and not uncaught


# Nodes ---------------------------------------------------------------------------------------------------------------


def node(name, address, slots=4.0, gpus=0.0):
    return Node(name, address, 1, {"slot": slots, "GPU": gpus, "CPU": 8.0})


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o600])
def test_the_ray_auth_token_is_readable_only_by_its_user(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(os.environ, "RAY_AUTH_TOKEN", "")  # restored after the test
    monkeypatch.setitem(os.environ, "RAY_AUTH_TOKEN_PATH", "")
    placement._have_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64 and not [*tmp_path.rglob("auth_token")], "Ray's file has mode 0644"
    os.environ["RAY_AUTH_TOKEN"] = ""
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("t" * 64)
    file.chmod(mode)
    placement._have_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "" and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_token_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("t" * 64)
    os.chown(file, 65534, -1)
    for join in (placement._have_token, lambda: joining.join_ray("127.0.0.1:1")):
        with pytest.raises(EngineError, match=r"auth_token.* belongs to user 65534.* RAY_AUTH_TOKEN_PATH"):
            join()


def test_nodes_are_chosen_starting_at_the_driver_if_they_have_free_slots():
    nodes = [node("c", "10.0.0.10"), node("b", "10.0.0.9"), node("full", "10.0.0.1", slots=1), node("d", "10.0.0.11")]
    bundle = {"slot": 1, "CPU": 0.01}
    assert [each.id for each in choose(nodes, 3, 2, bundle, "d")] == ["d", "b", "c"]
    assert [each.id for each in choose(nodes, 1, 4, bundle, "elsewhere")] == ["b"]
    assert [each.id for each in choose(nodes, 3, 2, bundle, "d", ["10.0.0.10", "10.0.0.9"])] == ["c", "b", "d"]
    assert choose(nodes, 4, 2, bundle, "d") is None
    assert choose(nodes, 1, 1, bundle | {"GPU": 1}, "d") is None


CPU_HEAD = Node("head", "10.0.0.1", 1, {"CPU": 8.0, "slot": 8.0}, {"CPU": 8.0, "slot": 8.0})
BUSY = Node("busy", "10.0.0.2", 1, {"CPU": 8.0}, {"CPU": 8.0, "slot": 8.0, "GPU": 8.0})
IDLE = Node("idle", "10.0.0.3", 1, BUSY.total, BUSY.total)


@pytest.mark.parametrize(
    ("setting", "nodes", "device", "why"),
    [
        ("auto", [CPU_HEAD], "cpu", "0 of 1 Ray nodes have GPUs"),
        ("auto", [CPU_HEAD, IDLE], "cuda", "1 of 2 Ray nodes have GPUs"),
        ("auto", [CPU_HEAD, BUSY], "cuda", "1 of 2 Ray nodes have GPUs"),
        ("cpu", [CPU_HEAD, IDLE], "cpu", "cluster.device=cpu"),
        ("cuda", [CPU_HEAD], "cuda", "cluster.device=cuda"),
    ],
)
def test_the_device_depends_on_the_nodes_and_not_on_the_driver(setting, nodes, device, why):
    found, reason = device_of(setting, nodes)
    assert found == device and why in reason


def test_too_few_gpus_are_an_error_and_not_replaced_by_cpus():
    config, bundle = Config(), {"slot": 1, "CPU": 0.01, "GPU": 1}
    config.trainer.nnodes, config.trainer.n_gpus_per_node, config.cluster.ray_address = 2, 8, "auto"
    _, why = device_of("auto", [CPU_HEAD, BUSY, IDLE])
    assert choose([CPU_HEAD, BUSY, IDLE], 1, 8, bundle, "head") == [IDLE]
    assert choose([CPU_HEAD, BUSY, IDLE], 2, 8, bundle, "head") is None
    text = placement.no_slots_message(config, bundle, [CPU_HEAD, BUSY, IDLE], why, {"busy": ["job 07"]})
    for words in (
        "trainer.n_gpus_per_node=8 slots",
        "trainer.nnodes=2 nodes (cluster.device=auto, and 2 of 3 Ray nodes have GPUs)",
        "10.0.0.1 (head): 8 of 8 slot, 8 of 8 CPU, 0 of 0 GPU; ",
        "10.0.0.2 (busy): 0 of 8 slot, 8 of 8 CPU, 0 of 8 GPU, held by job 07; 10.0.0.3 (idle): 8 of 8 slot",
        "Other jobs hold them: wait longer (cluster.timeout_s)",
    ):
        assert words in text
    assert "--resources" not in text, "the cluster has enough slots"
    text = placement.no_slots_message(config, bundle, [CPU_HEAD, IDLE], why, {})
    assert "--num-gpus=N --resources='{\"slot\": N}', or run on CPUs (cluster.device=cpu)" in text
    config.cluster.ray_address = None
    assert "GPUs on this machine" in placement.no_slots_message(config, bundle, [CPU_HEAD], "cluster.device=cuda", {})


def test_a_node_is_alive_while_its_port_accepts_connections():
    with socket.create_server(("127.0.0.1", 0)) as server:
        alive = Node("a", "127.0.0.1", server.getsockname()[1], {})
        assert answers(alive)
    assert not answers(alive)


def test_slots_and_workers_are_placed_as_planned():
    nodes = (node("a", "10.0.0.1"), node("b", "10.0.0.2"))
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node, config.rollout.tensor_model_parallel_size = 2, 4, 2
    occupants = placement.Slots(None, config.slots, "cpu", nodes=nodes).occupants(2)
    planned = [set(), set()]
    for place in placements(config, {"actor": SimpleNamespace(tower=0, share=lambda _: None)}):
        planned[place.node] |= {place.engine.partition(" ")[0], place.trainer.partition(":")[0]}
    assert [set(occupants[each].split(", ")) for each in nodes] == planned
    assert lost_message([nodes[1]], occupants).startswith(
        "lost node 10.0.0.2 (b), which ran rollout/2, rollout/3, trainer/4, trainer/5, trainer/6, trainer/7"
    )


def test_recommendations_after_the_loss_of_a_node_are_valid():
    before, after = ({"trainer": {"nnodes": n, "n_gpus_per_node": 2}} for n in (2, 1))
    assert {change.effect for change in differences(before, after)} == {Effect.NEXT_STEP}
    lost = lost_message([node("b", "10.0.0.2")], {node("b", "10.0.0.2"): "trainer/1"})
    assert (
        "or rerun the command with fewer slots (trainer.nnodes, trainer.n_gpus_per_node) to resume with those" in lost
    )
    config = Config()
    config.cluster.ray_address = "auto"
    message = placement.no_slots_message(config, {"slot": 1}, [node("b", "10.0.0.2", slots=0)], "", {}, again=True)
    assert "to what is there" not in message and message.endswith("Start the nodes with --resources='{\"slot\": N}'.")


def test_an_engine_must_fit_on_one_node():
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node, config.rollout.tensor_model_parallel_size = 2, 3, 2
    assert any(
        "tensor_model_parallel_size=2: must divide the 3 slots of a node" in line for line in check(config, Facts())
    )


def test_several_nodes_need_a_cluster(tmp_path):
    config = Config()
    config.trainer.nnodes, config.trainer.default_local_dir = 2, str(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.nnodes=2: .*ray start --head.*cluster.ray_address=auto"):
        open_job(config)
