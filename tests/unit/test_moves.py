"""Offloading and loading of models, resumed optimizers, and sums of bfloat16 gradients, in one process.

Source and target of a move are both host memory; storages are moved, emptied and restored as on a GPU.
"""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from small_network import Network, loss
from transformers import LlamaConfig, LlamaForCausalLM

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import ActorConfig, Config, OptimConfig
from rlfuse.engines.deepspeed import optimizer, states
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.memory import ZeroMemory
from rlfuse.engines.deepspeed.optimizer import freeze, take_step, trainable
from rlfuse.engines.fsdp2.fsdp2_model import Fsdp2Model
from rlfuse.engines.fsdp2.memory import Fsdp2Memory
from rlfuse.engines.pipeline import split_backward
from rlfuse.engines.pipeline.split_backward import Tape, split_linears
from rlfuse.engines.pipeline.stages import DeviceStages
from rlfuse.engines.trainer import offloading, state_files
from rlfuse.engines.trainer.base_rank import Rank
from rlfuse.engines.trainer.offloading import to_device, to_host
from rlfuse.engines.trainer.saving import checkpoint_writer
from rlfuse.engines.trainer.state_files import SavedState
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.errors import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAIRS = [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (3, "float32")]
"""ZeRO stage and dtype."""


@pytest.fixture(scope="module", autouse=True)
def group():
    """Initialize DeepSpeed with one process, and buckets that are smaller than some parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "REDUCE_BUCKET_ELEMENTS", 300)
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        optimizer.deepspeed.init_distributed("gloo", verbose=False)
        yield
        optimizer.deepspeed.comm.destroy_process_group()


def engine(stage, dtype, **actor):
    return movable(
        trainable(Network(DTYPES[dtype]), ActorConfig(zero_stage=stage, **actor), OptimConfig(lr=1e-2), "cpu")
    )


def movable(engine):
    """Add the methods by which a `DeepSpeedModel` is offloaded to an engine."""
    model = DeepSpeedModel(engine, 1)
    engine.tensors, engine.step_tensors = model.tensors, model.step_tensors
    return engine


def accumulate(engine, seeds):
    for seed in seeds:
        engine.backward(loss(engine, seed), scale_wrt_gas=False)


def saved(engine, folder: Path):
    """Return {name: tensor} that a rank saves for an engine."""
    return {name: tensor for name, tensor in states_of(engine, folder).items() if name != "parts"}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys() and len(ours) > 8
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert any(tensor.any() for name, tensor in theirs.items() if "weight" in name)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_moves_change_neither_states_nor_training(tmp_path, stage, dtype):
    mover, twin = engine(stage, dtype), engine(stage, dtype)
    for each in (mover, twin):
        accumulate(each, range(2))
        take_step(each, 2.0, 1)
    before = saved(mover, tmp_path / "there")
    to_host(mover)
    to_host(mover)  # no-op
    assert_same(saved(mover, tmp_path / "offloaded"), before)
    assert not next(iter(mover.module.buffers())).untyped_storage().nbytes()
    for _ in range(2):
        to_device(mover)
    assert_same(saved(mover, tmp_path / "loaded"), before)
    accumulate(mover, range(2, 4))
    to_host(mover)  # with accumulated gradients
    to_device(mover)
    accumulate(mover, range(4, 6))
    accumulate(twin, range(2, 6))
    assert take_step(mover, 4.0, 1) == take_step(twin, 4.0, 1) > 0
    assert_same(saved(mover, tmp_path / "mover"), saved(twin, tmp_path / "twin"))


@pytest.mark.slow
@pytest.mark.parametrize("before", PAIRS)
@pytest.mark.parametrize("after", PAIRS)
def test_state_is_resumed_under_every_zero_stage(tmp_path, before, after):
    """Compare resumed and continued training on one rank, where all stages of a dtype take the same steps."""
    if before[1] != after[1]:
        return
    trained, resumed = engine(*before), engine(*after)
    for seed in range(2):
        accumulate(trained, [seed])
        take_step(trained, 1.0, 1)
    states_of(trained, tmp_path / "before")
    accumulate(resumed, [7])
    take_step(resumed, 1.0, 1)  # replaced by the loaded state
    resume(resumed, tmp_path / "before")
    assert same(states_of(resumed, tmp_path / "after"), states_of(trained, tmp_path / "again"))
    norms = []
    for each in (trained, resumed):
        accumulate(each, range(2, 4))
        norms.append(take_step(each, 2.0, 1))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    ours, theirs = states_of(resumed, tmp_path / "resumed"), states_of(trained, tmp_path / "trained")
    assert ours.pop("parts") == theirs.pop("parts") and ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_state_saved_before_the_first_step_has_no_moments(tmp_path, stage, dtype):
    stepped, fresh = engine(stage, dtype), engine(stage, dtype)
    states_of(stepped, tmp_path / "start")
    accumulate(stepped, [7])
    take_step(stepped, 1.0, 1)
    resume(stepped, tmp_path / "start")
    for each in (stepped, fresh):
        accumulate(each, range(2))
    assert take_step(stepped, 2.0, 1) == take_step(fresh, 2.0, 1)
    assert same(states_of(stepped, tmp_path / "stepped"), states_of(fresh, tmp_path / "fresh"))


def of_optimizer(engine):
    """Return the storages of master weights and moments, without those of the model weights."""
    inner = engine.basic_optimizer
    found = [*(each for group in inner.param_groups for each in group["params"]), *inner.state]
    found += [value for state in inner.state.values() for value in state.values()]
    weights = [getattr(each, "ds_tensor", each) for each in engine.module.parameters()]
    storages = {id(each): each.untyped_storage() for each in found if all(each is not weight for weight in weights)}
    return {storage._cdata: storage for storage in storages.values()}.values()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_optimizers_loaded_after_the_weights_take_the_same_steps(tmp_path, stage, dtype):
    rank, twin = TrainerRank(Config(), 0, 1, "cuda"), engine(stage, dtype)
    mover = rank.engines["actor"] = engine(stage, dtype)
    for count, residency in enumerate(("training", "forecast", "step", "forecast")):
        rank.config.actor.optimizer_residency = residency
        rank.switch("rollout")
        rank.fetch_optimizers()
        assert all(not storage.nbytes() for storage in of_optimizer(mover)), "loaded while the engine uses the device"
        seconds = rank.switch("trainer")
        states = of_optimizer(mover)
        assert bool(seconds) == (residency == "forecast")
        assert all(bool(storage.nbytes()) == (residency == "training") for storage in states)
        if count == 1:
            assert_same(saved(mover, tmp_path / f"{count}"), saved(twin, tmp_path / f"twin_{count}"))
            assert not any(storage.nbytes() for storage in states), "saving must not load the optimizer"
        for each in (mover, twin):
            accumulate(each, range(2 * count, 2 * count + 2))
        if count % 2:
            rank.fetch_optimizers()
        with rank.stepping("actor"):
            norm = take_step(mover, 2.0, 1)
        assert norm == take_step(twin, 2.0, 1) > 0
        assert all(bool(storage.nbytes()) == (residency != "step") for storage in of_optimizer(mover))
    assert_same(saved(mover, tmp_path / "mover"), saved(twin, tmp_path / "twin"))
    waits = [span for span in rank.drain() if span.kind == "optimizer_wait"]
    assert {span.attributes["model"] for span in waits} == {"actor"} and all(s.attributes["bytes"] > 0 for s in waits)


@pytest.fixture
def appeared():
    """Return a function that lists storages of all tensors, with gradients, created since the test began."""
    gc.collect()
    gc.freeze()

    def storages():
        gc.collect()  # otherwise unreachable cycles count, depending on the last collection
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
        tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
        found = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
        return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}

    yield storages
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "trains"), [*((stage, True) for stage in range(4)), (0, False), (3, False)])
def test_offloading_leaves_no_tensor_on_the_device(appeared, stage, trains):
    if trains:
        model = engine(stage, "bfloat16")
        for _ in range(2):  # a step, and accumulated gradients
            accumulate(model, range(2))
            if not model.global_steps:
                take_step(model, 2.0, 1)
    else:
        model = movable(freeze(Network(torch.bfloat16), ActorConfig(zero_stage=stage), "cpu"))
    count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    resident = appeared()
    assert sum(resident.values()) >= (18 if trains else 2) * count
    to_host(model)
    copies = {piece.data_ptr() for each in offloading._offloaded[model] for piece in each.copies}
    assert [size for at, size in appeared().items() if at not in copies and size > 64] == []
    to_device(model)
    with torch.no_grad():
        assert float(loss(model, 0)) > 0


def stages(dtype="float32", **actor):
    """Return the engine and network of a pipeline stage, whose linear layers can defer weight gradients."""
    network = Network(DTYPES[dtype])
    tape = Tape()
    split_linears(network, tape)
    settings, device = ActorConfig(zero_stage=1, **actor), "cuda"  # fused AdamW as on a GPU; it also runs on CPUs
    return movable(trainable(DeviceStages({"3": network}), settings, OptimConfig(lr=1e-2), device)), network


def run(network, seeds):
    """Run forward and backward passes as an executor does, without DeepSpeed's backward."""
    for seed in seeds:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(network.dtype)
        network(x.requires_grad_()).float().square().sum().backward()


def states_of(trained, folder):
    model = DeepSpeedModel(trained, 1)
    with checkpoint_writer([trained]) as files:
        state_files.save(folder, 0, model.parts(), model.steps, files)
    assert files.problem is None
    with safe_open(folder / "state_0.safetensors", "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        return tensors | {"parts": opened.metadata()["parts"]}


def resume(trained, folder):
    DeepSpeedModel(trained, 1).load(SavedState(folder))


def same(ours, theirs):
    assert ours.pop("parts") == theirs.pop("parts")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_pipelines_are_saved_from_host_or_device_and_resumed(tmp_path, dtype):
    (trained, network), (twin, other) = stages(dtype), stages(dtype)
    for engine_, module in ((trained, network), (twin, other)):
        run(module, range(2))
        take_step(engine_, 2.0, 1)
    before = states_of(trained, tmp_path / "there")
    assert all(tensor.any() for name, tensor in before.items() if "weight" in name)
    to_host(trained)
    assert same(states_of(trained, tmp_path / "offloaded"), dict(before))
    to_device(trained)
    assert same(states_of(trained, tmp_path / "loaded"), dict(before))
    fresh, resumed = stages(dtype)
    resume(fresh, tmp_path / "offloaded")
    run(other, range(5, 8))
    take_step(twin, 3.0, 1)  # then restore the saved state
    resume(twin, tmp_path / "offloaded")
    norms = []
    for engine_, module in ((trained, network), (fresh, resumed), (twin, other)):
        run(module, range(2, 5))
        norms.append(take_step(engine_, 3.0, 1))
    assert norms[0] == norms[1] == norms[2] > 0
    after = states_of(trained, tmp_path / "after")
    assert same(states_of(fresh, tmp_path / "fresh"), dict(after)) and same(states_of(twin, tmp_path / "twin"), after)


def test_resumed_optimizer_state_matches_that_of_a_first_step(tmp_path):
    """Compare dtypes, devices and shapes, which fused kernels require."""
    (stepped, network), (resumed, _) = stages(), stages()
    run(network, range(2))
    take_step(stepped, 2.0, 1)
    states_of(stepped, tmp_path)
    resume(resumed, tmp_path)
    kinds = []
    for each in (stepped, resumed):
        (state,) = each.optimizer.optimizer.state.values()
        assert each.optimizer.optimizer.param_groups[0]["fused"] and float(state["step"]) == 1.0
        kinds.append({name: (value.dtype, value.device, value.shape) for name, value in state.items()})
    assert kinds[0] == kinds[1]


class Placing(torch.optim.AdamW):
    """AdamW without arithmetic: creates its state as torch does, even on devices without kernels."""

    def step(self, closure=None):
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])
            assert not group["lr"]


class Counting(torch.optim.AdamW):
    """AdamW without arithmetic whose step count is an int, as in DeepSpeed's CPU Adam."""

    def step(self, closure=None):
        for group in self.param_groups:
            assert not group["lr"]
            for flat in group["params"]:
                self.state[flat] = {"step": 1, **{name: torch.zeros_like(flat) for name in state_files.MOMENTS}}


def resumed_at_5(flat, optimizer):
    flat.grad = torch.full_like(flat, 7.0)
    gradient, rate = flat.grad, optimizer.param_groups[0]["lr"]
    states.make_moments(SimpleNamespace(basic_optimizer=optimizer, optimizer=None), 5)
    assert flat.grad is gradient and optimizer.param_groups[0]["lr"] == rate > 0
    return optimizer.state[flat]


def test_resumed_step_count_is_on_the_device_that_torch_uses():
    for options, device in (({"capturable": True}, "meta"), ({}, "cpu")):  # `fused` does the same, but needs a GPU
        flat = torch.nn.Parameter(torch.ones(4, device="meta"))
        state = resumed_at_5(flat, Placing([flat], **options))
        assert (state["step"].device.type, state["step"].dtype) == (device, torch.float32)
        assert state["exp_avg"].device.type == "meta" and (device == "meta" or state["step"] == 5.0)


def test_integer_step_count_stays_an_integer():
    flat = torch.nn.Parameter(torch.ones(4))
    state = resumed_at_5(flat, Counting([flat]))
    assert state["step"] == 5 and type(state["step"]) is int


# Sums of gradients ----------------------------------------------------------------------------------------------------

COUNT = 256


@pytest.fixture(scope="module")
def summed():
    """Return {name: gradients of bfloat16 micro-batches, summed in float32}."""
    network, total = Network(torch.bfloat16), {}
    for seed in range(COUNT):
        loss(network, seed).backward()
        for name, parameter in network.named_parameters():
            total[name] = total.get(name, 0.0) + parameter.grad.float()
            parameter.grad = None
    return total


def stepped_by(engine):
    """Return the flat gradient that the optimizer receives."""
    found = []
    engine.basic_optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.extend(
            each.grad.flatten().clone() for group in optimizer.param_groups for each in group["params"]
        )
    )
    take_step(engine, float(COUNT), 1)
    return torch.cat(found) * COUNT


def error(found, summed):
    """Return the relative error of the norm; the padding of a partition must be zero."""
    expected = torch.cat([gradient.flatten() for gradient in summed.values()])
    assert not found[len(expected) :].any()
    return float((found[: len(expected)] - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bfloat16_gradients_of_256_micro_batches_are_summed_accurately(summed, stage):
    trained = engine(stage, "bfloat16", grad_clip=0.0)
    accumulate(trained, range(COUNT))
    assert error(stepped_by(trained), summed) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_in_bfloat16_are_inaccurate(summed, stage):
    trained = engine(stage, "bfloat16", grad_clip=0.0, grad_accum_dtype="bfloat16")
    accumulate(trained, range(COUNT))
    assert error(stepped_by(trained), summed) > 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("deferring", [False, True])
def test_gradients_of_pipelines_are_summed_accurately(summed, deferring):
    trained, network = stages("bfloat16", grad_clip=0.0)
    tape = network.layers[0].tape
    for seed in range(COUNT):
        tape.deferring = deferring
        run(network, [seed])
        split_backward.run(tape.take())
    assert {parameter.grad.dtype for parameter in network.parameters()} == {torch.float32}
    assert error(stepped_by(trained), summed) < 1e-4


def test_float32_weights_accumulate_gradients_in_float32():
    for accum in DTYPES:
        trained = engine(1, "float32", grad_accum_dtype=accum)
        accumulate(trained, [0])
        assert {parameter.grad.dtype for parameter in trained.parameters()} == {torch.float32}


def test_planned_bytes_of_gradients():
    def sums(dtype, accum):
        config = Config()
        config.model.dtype, config.actor.grad_accum_dtype = dtype, accum
        for config.actor.zero_stage in range(4):
            yield ZeroMemory(config, 8, "cuda").states("actor", 1.0)[0].size

    assert [*sums("bfloat16", "float32")] == [4, 4, 0.5, 0.5]
    assert [*sums("bfloat16", "bfloat16")] == [2, 2, 0.25, 0.25]
    assert [*sums("float32", "bfloat16")] == [4, 4, 0.5, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_planned_bytes_match_an_fsdp2_model(dtype):
    config = Config()
    config.model.dtype = dtype
    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16)
    model = Fsdp2Model.trained(
        LlamaForCausalLM(small).to(DTYPES[dtype]), config, OptimConfig(lr=1e-2), "cpu", ParallelMesh()
    )
    held, plan = sum(each.numel() for each in model.module.parameters()), Fsdp2Memory(config, 1, "cpu")
    for _ in range(2):
        model.backward(model(input_ids=torch.arange(8)[None]).logits.float().square().sum())
        gradients = sum(each.grad.to_local().nbytes for each in model.module.parameters())
        model.step(1.0, 1.0)
    moments = sum(each.nbytes for each in model.step_tensors() if each.dim())
    assert [gradients, moments] == [part.size for part in plan.states("actor", held)]
    whole = sum(each.nbytes for each in model.tensors() if each.dim()) - sum(
        each.nbytes for each in model.module.buffers()
    )
    assert whole - moments == plan.parameters(held)


# Ranks ---------------------------------------------------------------------------------------------------------------


def test_rank_refuses_calls_while_its_models_are_offloaded():
    rank = TrainerRank(Config(), 0, 1, "cuda")
    rank.engines, rank.extra_modules = {"actor": engine(1, "bfloat16")}, [Network()]
    before = float(loss(rank.engines["actor"], 0))
    for _ in range(2):
        rank.switch("rollout")
    assert all(
        not next(iter(m.buffers())).untyped_storage().nbytes() for m in (rank.engines["actor"], *rank.extra_modules)
    )
    for call in (lambda: rank.score(("actor",), []), lambda: rank.step("actor", 1.0), lambda: rank.share_ipc([])):
        with pytest.raises(EngineError, match=r"trainer/0 cannot run \w+: its models are offloaded"):
            call()
    for _ in range(2):
        rank.switch("trainer")
    assert float(loss(rank.engines["actor"], 0)) == before
    assert [span.attributes["to"] for span in rank.drain()] == ["rollout", "rollout", "trainer", "trainer"]
    on_cpu = Rank(Config(), 0, 1, "cpu")
    on_cpu.engines = rank.engines
    on_cpu.switch("rollout")
    assert float(loss(rank.engines["actor"], 0)) == before
