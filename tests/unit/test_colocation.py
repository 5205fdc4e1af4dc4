"""Device sharing between an engine and the trainer ranks of its slot: which side switches, and in which order."""

from types import SimpleNamespace

import pytest

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline.pipeline_trainer import PipelineTrainer
from rlfuse.engines.rollout.liveness import Liveness
from rlfuse.engines.trainer import rank_group
from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.engines.vllm.rollout_worker import RolloutWorker
from rlfuse.protocols import DeviceSharing


@pytest.mark.parametrize("kind", [TrainerGroup, PipelineTrainer])
async def test_only_the_ranks_of_the_slot_switch(kind, monkeypatch):
    switched, config = [], Config()
    config.rollout.tensor_model_parallel_size = 2

    async def call(*_):
        return 0.0

    monkeypatch.setattr(rank_group, "call", call)
    ranks = [
        SimpleNamespace(switch=SimpleNamespace(remote=lambda role, i=i: switched.append((i, role)))) for i in range(6)
    ]
    group = kind(config, ranks)
    await group.acquire_device(1)
    await group.release_device(2)
    assert switched == [(2, "trainer"), (3, "trainer"), (4, "rollout"), (5, "rollout")]
    await group.acquire_device(1)
    assert len(switched) == 4, "the ranks already hold the device"
    await group.release_device(1)
    assert switched[4:] == [(2, "rollout"), (3, "rollout")]


async def test_ranks_receive_the_planned_device_sharing(monkeypatch):
    calls = []

    async def call(reference, *_):
        return reference

    def rank(i):
        methods = dict(device_bytes=lambda: 100 - i, share=lambda sharing: calls.append((i, sharing)))
        methods["make_room"] = lambda: calls.append(i)
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})

    monkeypatch.setattr(rank_group, "call", call)
    group, sharing = (
        TrainerGroup(Config(), [rank(i) for i in range(2)]),
        DeviceSharing(alternates=False, max_rank_bytes=10),
    )
    assert group.sharing.alternates and await group.device_bytes() == 99
    await group.share(sharing)
    assert group.sharing == sharing and calls == [(0, sharing), (1, sharing)]
    await group.make_room(1)
    assert calls[2:] == [1]


async def test_optimizers_are_fetched_once_after_the_weights_of_their_slot(monkeypatch):
    fetched, config = [], Config()
    config.rollout.tensor_model_parallel_size = 2

    async def call(reference, *_):
        return reference

    def rank(i):
        return SimpleNamespace(
            switch=SimpleNamespace(remote=lambda role: float(i) if role == "trainer" else 0.0),
            fetch_optimizers=SimpleNamespace(remote=lambda: fetched.append(i)),
        )

    monkeypatch.setattr(rank_group, "call", call)
    group = TrainerGroup(config, [rank(i) for i in range(4)])
    assert group.offloaded_optimizers == {}
    await group.acquire_device(0)
    await group.acquire_device(1)
    assert group.offloaded_optimizers == {0: 1.0, 1: 3.0}, "the time of the slowest rank"
    await group.fetch_optimizers(1)
    assert fetched == [2, 3] and group.offloaded_optimizers == {0: 1.0}
    await group.release_device(0)
    assert group.offloaded_optimizers == {}


class Engine:
    """Sleep and wake-up calls of vLLM; as there, `wake_up` is a no-op if one of its tags is already awake."""

    def __init__(self):
        self.asleep, self.calls = set(), []

    async def sleep(self, level):
        self.calls.append("sleep" if level == 1 else "discard")
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags=None):
        self.calls.append(tags)
        if set(tags or self.asleep) <= self.asleep:
            self.asleep -= set(tags or self.asleep)

    async def pause_generation(self, **_):
        self.calls.append("pause")

    async def start_weight_update(self):
        assert "weights" not in self.asleep

    async def nothing(self, **_):
        pass

    finish_weight_update = reset_prefix_cache = reset_encoder_cache = resume_generation = nothing


@pytest.fixture
def worker():
    worker = RolloutWorker(0)
    worker._engine, worker._device, worker._liveness = Engine(), "cuda", Liveness(lambda: 0.0)
    worker._meter = SimpleNamespace(pause=lambda: None)
    return worker


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
async def test_an_engine_generates_only_after_all_its_parts_are_awake(worker):
    for _ in range(2):
        await worker.sleep()
    with pytest.raises(RuntimeError, match="rollout/0 has its weights asleep; wake them before pushing new ones"):
        await worker.begin_update()
    for _ in range(2):
        await worker.wake("weights")
    assert worker._engine.asleep == {"kv_cache"}
    await worker.begin_update()
    with pytest.raises(RuntimeError, match="rollout/0 is asleep; wake it before submitting 0 samples"):
        worker._admit([])
    await worker.wake()
    assert not worker._engine.asleep
    worker._admit([])
    assert worker._engine.calls == ["sleep", ["weights"], "pause", None]


@pytest.mark.slow
async def test_an_engine_sleeps_again_after_an_incomplete_push(worker):
    await worker.sleep()
    await worker.wake("weights")
    await worker.sleep()
    assert worker._engine.asleep == {"weights", "kv_cache"} and worker._engine.calls == ["sleep", ["weights"], "sleep"]


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
async def test_weights_that_the_next_push_overwrites_are_not_saved(worker):
    await worker.sleep(discard=True)
    assert worker._engine.calls == ["sleep"], "not all tensors are restored by a push"
    await worker.wake()
    worker._restorable = True
    await worker.sleep(discard=True)
    for _ in range(2):
        await worker.wake()
        await worker.sleep()
    await worker.wake()
    with pytest.raises(
        RuntimeError, match="rollout/0 has discarded its weights; push new ones before submitting 0 samples"
    ):
        worker._admit([])
    await worker.begin_update()
    await worker.finish_update(1)
    worker._admit([])
    await worker.sleep()
    assert worker._engine.calls == ["sleep", None, *3 * ["discard", None], "pause", "sleep"]


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_tensors_not_restored_by_a_push_are_found():
    import torch

    from rlfuse.engines.vllm.receiver import unpushed_tensors

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    linear = model[0]
    linear.view_of_weight, linear.kv_cache, linear.none = linear.weight.data[:1], torch.ones(1), torch.empty(0)
    assert unpushed_tensors(model, "cpu") == []
    linear.workspace, linear.impl = torch.zeros(1), SimpleNamespace(slopes=torch.ones(2), scale=1.0)
    assert unpushed_tensors(model, "cpu") == ["0.workspace", "0.impl.slopes"]
    assert unpushed_tensors(model, "cuda") == []
