import errno
from types import SimpleNamespace

import pytest

from rlfuse.engines import weights_depot
from rlfuse.engines.protocols import EngineError, EngineLost
from rlfuse.engines.weights import WeightPush, plan_buckets, resolve_transfer
from rlfuse.engines.weights_depot import Depot, DepotHandle


def test_buckets_keep_the_order_and_stay_within_their_size():
    sizes = [("a", 3), ("b", 4), ("c", 5), ("d", 2), ("e", 1)]
    assert plan_buckets(sizes, 8) == [["a", "b"], ["c", "d", "e"]]


def test_a_tensor_larger_than_a_bucket_gets_its_own():
    assert plan_buckets([("a", 1), ("big", 100), ("b", 1), ("c", 1)], 10) == [["a"], ["big"], ["b", "c"]]


def test_an_exact_fit_and_nothing_at_all():
    assert plan_buckets([("a", 5), ("b", 5), ("c", 1)], 10) == [["a", "b"], ["c"]]
    assert plan_buckets([("empty", 0)], 10) == [["empty"]]
    assert plan_buckets([], 10) == []


def test_transfer_follows_the_device():
    assert resolve_transfer("auto", "cpu") == "shm"
    assert resolve_transfer("auto", "cuda") == "ipc"
    assert resolve_transfer("shm", "cuda") == "shm"
    with pytest.raises(ValueError, match="needs GPUs"):
        resolve_transfer("nccl", "cpu")
    with pytest.raises(ValueError, match="choose auto, shm, nccl or ipc"):
        resolve_transfer("rdma", "cuda")


class Recording:
    """An exporter and an engine in one, writing down what happens."""

    name, devices, restarts = "rollout/0", 2, 0

    def __init__(self, buckets, held=None):
        self.buckets, self.events, self.held, self.alive = buckets, [], held, 0

    async def bucket_plan(self):
        return self.buckets

    async def stand(self):
        self.events.append("stand")

    async def export_bucket(self, names, path):
        with open(path, "wb") as file:
            file.write(b"x" * 1000)
        self.events.append(f"write {names[0]}")

    async def begin_update(self):
        self.events.append("begin")

    async def receive(self, info):
        with open(info["path"], "rb") as file:
            assert len(file.read()) == 1000
        self.events.append("receive")

    async def finish_update(self, version):
        self.events.append("finish")
        self.held = version if self.held is None else self.held

    async def version(self):
        return self.held


def push(recording, tmp_path):
    return WeightPush(recording, [recording], bucket_mb=512, depots=[DepotHandle([recording], Depot(tmp_path))])


async def test_every_bucket_is_received_and_nothing_stays_behind(tmp_path):
    recording = Recording([["a"], ["b"], ["c"]])
    await push(recording, tmp_path).push(3)
    assert recording.events[:3] == ["stand", "write a", "begin"]
    assert sorted(recording.events[3:-1]) == ["receive", "receive", "receive", "write b", "write c"]
    assert recording.events[-1] == "finish"
    assert not list(tmp_path.iterdir())


async def test_an_engine_with_another_version_is_named(tmp_path):
    with pytest.raises(EngineError, match="pushed as version 3, but rollout/0 has 2"):
        await push(Recording([["a"]], held=2), tmp_path).push(3)


async def test_full_shared_memory_while_writing_is_explained(tmp_path):
    class Full(Recording):
        async def export_bucket(self, names, path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EngineError, match=r"needs up to 512 MiB, \d+ MiB are free.*rollout.update_weights_bucket_mb"):
        await push(Full([["a"]]), tmp_path).push(1)
    assert not list(tmp_path.iterdir())


async def test_full_shared_memory_is_noticed_before_writing(tmp_path, monkeypatch):
    recording = Recording([["a"], ["b"]])
    monkeypatch.setattr(weights_depot, "free_bytes", lambda folder: 500)
    with pytest.raises(EngineError, match="needs up to 1 MiB, 0 MiB are free"):
        await push(recording, tmp_path).push(1)
    assert "write b" not in recording.events
    assert not list(tmp_path.iterdir())


async def test_a_failing_engine_stops_the_push_and_leaves_no_file(tmp_path):
    class Broken(Recording):
        async def receive(self, info):
            raise EngineError("rollout/0 died")

    with pytest.raises(EngineError, match="rollout/0 died"):
        await push(Broken([["a"], ["b"], ["c"]]), tmp_path).push(1)
    assert not list(tmp_path.iterdir())


async def test_an_engine_that_is_lost_in_a_push_is_replaced_and_served_alone(tmp_path):
    class Mortal(Recording):
        name = "rollout/1"

        async def receive(self, info):
            await super().receive(info)
            if self.events.count("stand") == 1:
                raise EngineLost("rollout/1 died")

    first, second = Recording([["a"], ["b"]]), Mortal([])
    await WeightPush(first, [first, second], bucket_mb=1, depots=[DepotHandle([first, second], Depot(tmp_path))]).push(
        4
    )
    assert [event for event in first.events if "write" not in event] == ["stand", "begin", *["receive"] * 2, "finish"]
    assert second.events == ["stand", "begin", "receive", "stand", "begin", "receive", "receive", "finish"]
    assert first.held == second.held == 4 and not list(tmp_path.iterdir())


async def test_nccl_gives_each_engine_its_ranks_and_joins_once(tmp_path):
    joined, sent = [], []

    class Device(Recording):
        async def nccl_address(self):
            return "10.0.0.1", 4000

        async def open_nccl(self, host, port, world_size):
            joined.append((host, port, 0, world_size))

        async def join_transfer(self, info):
            joined.append((info["master_address"], info["master_port"], info["rank_offset"], info["world_size"]))

        async def describe(self, names):
            return {"names": names}

        async def send_nccl(self, names):
            sent.append(names)

        async def receive(self, info):
            self.events.append(info["names"])

    first, second = Device([["a"], ["b"]]), Device([])
    sync = WeightPush(first, [first, second], bucket_mb=1, transfer="nccl")
    await sync.push(1)
    await sync.push(1)
    assert joined == [("10.0.0.1", 4000, rank, 5) for rank in (0, 1, 3)]
    assert sent == [["a"], ["b"]] * 2
    assert second.events == ["stand", "begin", ["a"], ["b"], "finish"] * 2
    first.restarts += 1
    await sync.renew(0)
    assert joined[3:] == [("10.0.0.1", 4000, rank, 3) for rank in (0, 1)]


def test_ipc_handles_of_all_gpus_are_merged():
    from rlfuse.engines.weights_device import merge_ipc

    shared = [{"names": ["a", "b"], "ipc_handles": [{gpu: (gpu, 1)}, {gpu: (gpu, 2)}]} for gpu in ("x", "y")]
    merged = SimpleNamespace(**merge_ipc(shared))
    assert merged.names == ["a", "b"]
    assert merged.ipc_handles == [{"x": ("x", 1), "y": ("y", 1)}, {"x": ("x", 2), "y": ("y", 2)}]
