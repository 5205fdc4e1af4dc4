"""Buckets of pushed weights: planning, staging in shared memory, CUDA IPC, and lost engines."""

import asyncio
import errno

import pytest

from rlfuse.engines.weights import staging
from rlfuse.engines.weights.staging import StagingHandle, WeightStaging
from rlfuse.engines.weights.sync import WeightPush, plan_buckets, resolve_transfer
from rlfuse.errors import EngineError, EngineLost
from rlfuse.protocols import DeviceSharing


def test_buckets_keep_the_order_and_stay_within_their_size():
    sizes = [("a", 3), ("b", 4), ("c", 5), ("d", 2), ("e", 1)]
    assert plan_buckets(sizes, 8) == [["a", "b"], ["c", "d", "e"]]


def test_a_tensor_larger_than_a_bucket_gets_its_own():
    assert plan_buckets([("a", 1), ("big", 100), ("b", 1), ("c", 1)], 10) == [["a"], ["big"], ["b", "c"]]


def test_an_exact_fit_and_empty_inputs():
    assert plan_buckets([("a", 5), ("b", 5), ("c", 1)], 10) == [["a", "b"], ["c"]]
    assert plan_buckets([("empty", 0)], 10) == [["empty"]]
    assert plan_buckets([], 10) == []


def test_a_decoder_layer_stays_in_one_bucket():
    # The engine fuses tensors of a layer and keeps the first until the last arrives.
    attention = [(f"model.layers.{i}.self_attn.{part}_proj.weight", 3) for i in range(3) for part in "qkv"]
    sizes = [("model.embed_tokens.weight", 5), *attention, ("model.norm.weight", 1), ("lm_head.weight", 5)]
    buckets = plan_buckets(sizes, 10)
    assert [name for bucket in buckets for name in bucket] == [name for name, _ in sizes]
    assert [len(bucket) for bucket in buckets] == [1, 3, 3, 4, 1]
    assert [len(bucket) for bucket in plan_buckets(sizes, 8)] == [1, 3, 3, 3, 2]


def test_transfer_follows_the_device():
    assert resolve_transfer("auto", "cpu") == "shm"
    assert resolve_transfer("auto", "cuda") == "ipc"
    assert resolve_transfer("shm", "cuda") == "shm"
    assert resolve_transfer("auto", "cuda", stages=2) == "shm"
    with pytest.raises(ValueError, match="needs GPUs"):
        resolve_transfer("ipc", "cpu")


class Recording:
    """An exporter and an engine in one object that records calls."""

    name = "rollout/0"

    def __init__(self, buckets, held=None, lost=False):
        self.buckets, self.events, self.held, self.lost = buckets, [], held, lost

    async def bucket_plan(self):
        return self.buckets

    async def wait_ready(self):
        self.events.append("start")
        self.lost = False

    async def sleep(self, discard=False):
        self.events.append("sleep")

    async def wake(self, part=None):
        self.events.append(f"wake {part or 'all'}")

    sharing = DeviceSharing()

    async def make_room(self, slot):
        pass

    async def acquire_device(self, slot):
        self.events.append("acquire")

    async def release_device(self, slot):
        self.events.append("release")

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
    return WeightPush(
        recording, [recording], bucket_mb=512, stagings=[StagingHandle([recording], WeightStaging(tmp_path))]
    )


async def test_every_bucket_is_received_and_its_file_removed(tmp_path):
    recording = Recording([["a"], ["b"], ["c"]])
    await push(recording, tmp_path).push(3)
    assert recording.events[:5] == ["sleep", "acquire", "wake weights", "write a", "begin"]
    assert sorted(recording.events[5:-3]) == ["receive", "receive", "receive", "write b", "write c"]
    assert recording.events[-3:] == ["finish", "release", "wake all"]
    assert not list(tmp_path.iterdir())


async def test_an_engine_with_another_version_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="pushed as version 3, but rollout/0 has 2"):
        await push(Recording([["a"]], held=2), tmp_path).push(3)


async def test_full_shared_memory_during_writing_is_reported(tmp_path):
    class Full(Recording):
        async def export_bucket(self, names, path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(EngineError, match=r"up to 512 MiB needed, \d+ MiB free.*rollout.update_weights_bucket_mb"):
        await push(Full([["a"]]), tmp_path).push(1)
    assert not list(tmp_path.iterdir())


async def test_full_shared_memory_is_detected_before_writing(tmp_path, monkeypatch):
    recording = Recording([["a"], ["b"]])
    monkeypatch.setattr(staging.WeightStaging, "free", lambda self: 500)
    with pytest.raises(EngineError, match="up to 1 MiB needed, 0 MiB free"):
        await push(recording, tmp_path).push(1)
    assert "write b" not in recording.events
    assert not list(tmp_path.iterdir())


async def test_a_failed_engine_stops_the_push_and_leaves_no_file(tmp_path):
    class Broken(Recording):
        async def receive(self, info):
            raise EngineError("rollout/0 died")

    with pytest.raises(EngineError, match="rollout/0 died"):
        await push(Broken([["a"], ["b"], ["c"]]), tmp_path).push(1)
    assert not list(tmp_path.iterdir())


async def test_an_engine_lost_during_a_push_is_replaced_and_receives_a_separate_push(tmp_path):
    class Dying(Recording):
        name = "rollout/1"

        async def receive(self, info):
            await super().receive(info)
            if "start" not in self.events:
                self.lost = True
                raise EngineLost("rollout/1 died")

    first, second = Recording([["a"], ["b"]]), Dying([])
    await WeightPush(
        first, [first, second], bucket_mb=1, stagings=[StagingHandle([first, second], WeightStaging(tmp_path))]
    ).push(4)
    engine = [event for event in first.events if event not in ("acquire", "release") and "write" not in event]
    assert engine == ["sleep", "wake weights", "begin", "receive", "receive", "finish", "wake all"]
    repeated = ["sleep", "wake weights", "begin", "receive", "receive", "finish", "wake all"]
    assert second.events == ["sleep", "wake weights", "begin", "receive", "start", *repeated]
    assert first.events.count("release") == 3, "before the new engine starts, and twice at the end"
    assert first.held == second.held == 4 and not list(tmp_path.iterdir())


async def test_a_bucket_is_shared_until_every_engine_has_loaded_it():
    class Device(Recording):
        async def share_ipc(self, names):
            self.events.append(f"share {names[0]}")
            return [{"names": names, "ipc_handles": {}}]

        async def receive(self, info):
            self.events.append(f"receive {info['names'][0]}")
            await asyncio.sleep(0)
            self.events.append(f"loaded {info['names'][0]}")

        async def release_ipc(self):
            self.events.append("release ipc")

    device = Device([["a"], ["b"], ["c"]])
    await WeightPush(device, [device], bucket_mb=1, transfer="ipc").push(1)
    assert device.events[:3] == ["sleep", "acquire", "wake weights"] and device.events[-2:] == ["release", "wake all"]
    when = {event: position for position, event in enumerate(device.events)}
    for this, following in ("ab", "bc"):
        assert when[f"share {this}"] < when[f"receive {this}"] < when[f"loaded {this}"] < when[f"receive {following}"]
        assert when[f"share {following}"] < when[f"loaded {this}"], "the next bucket is packed while the engine loads"
    assert when["share c"] > when["loaded a"], "at most two buckets at a time"
    assert when["begin"] < when["receive a"] and when["loaded c"] < when["release ipc"] < when["finish"]


def test_offloaded_weights_cannot_be_shared_by_ipc():
    import torch

    from rlfuse.engines.weights.cuda_ipc import share_ipc

    with pytest.raises(EngineError, match=r"cannot be shared by CUDA IPC \(a, 2 of 2 tensors\)\. Acquire the devices"):
        share_ipc({"a": torch.zeros(2), "b": torch.zeros(2)})


def test_ipc_handles_of_all_gpus_are_merged():
    from rlfuse.engines.weights.cuda_ipc import merge_ipc

    shared = [{"names": ["a", "b"], "ipc_handles": {gpu: (gpu, 1)}} for gpu in ("x", "y")]
    assert merge_ipc(shared) == {"names": ["a", "b"], "ipc_handles": {"x": ("x", 1), "y": ("y", 1)}}


@pytest.mark.slow
def test_vllm_unpacks_the_packed_tensors():
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    from rlfuse.engines.weights.cuda_ipc import pack

    torch.manual_seed(0)
    tensors = {
        "odd": torch.randn(3, 5).bfloat16(),
        "scale": torch.randn(()),
        "transposed": torch.randn(4, 6).t(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "one": torch.randn(1).bfloat16(),
        "empty": torch.empty(0, 3),
        "wide": torch.randn(3, 2, 2, dtype=torch.float64),
    }
    described, buffer = pack(tensors)
    dtypes = [getattr(torch, name) for name in described["dtype_names"]]
    assert buffer.nbytes == sum(described["tensor_sizes"]) == sum(each.nbytes for each in tensors.values())
    found = dict(unpack_tensor(buffer, described["names"], described["shapes"], dtypes, described["tensor_sizes"]))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    tensors["odd"].zero_()
    assert found["odd"].any(), "a bucket is a copy, which the next optimizer step does not change"
