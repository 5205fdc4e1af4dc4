"""Contents of a device in each phase: replayed calls of the real controller, for every policy and kind of trainer."""

import asyncio
import json
import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from worlds.residency_replay import STEP, ResidencyError, ResidencyReplay, replayed_contents
from worlds.resident_engines import ResidentWorld
from worlds.scenes import Scene, scenes

from rlfuse.engines.memory.estimate import Budget, memory_of
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.remedies import problems
from rlfuse.engines.memory.residency import Item, contents
from rlfuse.errors import EngineError, RewardError
from rlfuse.fusion.decisions import Settings
from rlfuse.fusion.policies import POLICIES
from rlfuse.progress import timed
from rlfuse.protocols import DeviceSharing
from rlfuse.run.starting import start_parts
from rlfuse.simulate.clock import run_virtual
from rlfuse.stopping import Stopped

ZERO = {"ZeRO 0": 0, "ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3, "pipelines": 4}
exploring = settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


def scene_of(policy, estimator, zero, **more):
    kinds = Settings(lockstep=zero >= 3, lockstep_backward=zero >= 2, pipelined=zero == 4)
    return Scene(policy=policy, estimator=estimator, settings=kinds, slots=3, batch=6, steps=2, reference=True, **more)


def replay(world):
    run_virtual(world.run())
    planned = contents(world.trainer.residency == "step", world.trainer.sharing.alternates)
    for phase, items in world.ledger.resident.items():
        assert items <= planned[phase], phase
    return world


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, "num_key_value_heads": 4}))
    return read_shape(str(folder), "model.path")


def plan_of(config, zero, model, gib=80):
    """Return the memory plan of a 7B model on three GPUs."""
    config.actor.zero_stage, config.trainer.n_gpus_per_node = min(zero, 3) if zero < 4 else 1, 3
    config.training.pipeline_parallel_size = 3 if zero == 4 else 1
    models = dict.fromkeys(("actor", "critic", "reference") if config.uses_critic else ("actor", "reference"), model)
    return memory_of(config, models, Budget("cuda", int(gib * 2**30)))


EVERY_PAIR = [
    (policy, ("gae", "grpo")[(at + number) % 2], zero, (at + number // 2) % 2 == 0)
    for at, policy in enumerate(POLICIES)
    for number, zero in enumerate(ZERO)
]
"""Pairwise combinations of policy, estimator, kind of ranks, and whether engine and ranks alternate on the device."""


@pytest.mark.parametrize(("policy", "estimator", "zero", "alternates"), EVERY_PAIR)
def test_calls_use_only_resident_items(policy, estimator, zero, alternates, model):
    world = replay(ResidentWorld(scene_of(policy, estimator, ZERO[zero]), alternates=alternates))
    assert world.saved == [1, 2] and len(world.learned) == 2
    slots, discards = 3, sum(rollout.discards for rollout in world.rollouts)
    if alternates:  # before the first push of each slot, and when all samples of the step are generated
        assert discards >= slots + (2 * slots if policy == "serial" else 0)
    memory = plan_of(world.config(), ZERO[zero], model)
    assert memory.alternates == alternates
    for phase, items in world.ledger.resident.items():
        found = sum(part.size for part in memory.parts if part.item in items)
        assert 0 < found <= memory.total(phase) <= memory.total(memory.tightest)


@pytest.mark.parametrize("residency", ["training", "step"])
@pytest.mark.parametrize("zero", ["ZeRO 1", "ZeRO 3", "pipelines"])
def test_nothing_moves_when_engine_and_ranks_both_stay(residency, zero, tmp_path):
    options = dict(residency=residency, alternates=False)
    worlds = [ResidentWorld(scene_of("adaptive", "gae", ZERO[zero]), resumed=True, **options)]
    worlds += [ResidentWorld(scene_of("adaptive", "grpo", ZERO[zero]), tower=tmp_path, **options)]
    lost = scene_of("stream", "grpo", ZERO[zero], lost=(2.5, 2.6, 2.7))
    worlds += [ResidentWorld(lost, **options), ResidentWorld(scene_of("adaptive", "grpo", ZERO[zero]), **options)]
    worlds[-1].rollouts[1].dies_in_push = True
    for world in worlds:
        assert len(replay(world).learned) == 2
        assert not any(rollout.asleep or rollout.lost for rollout in world.rollouts)
    assert worlds[2].engines_restarted == 1


@pytest.mark.parametrize("residency", ["forecast", "step"])
@pytest.mark.parametrize("zero", ZERO)
def test_prefetched_optimizers_are_resident_when_they_are_read(zero, residency, model):
    for policy in POLICIES:
        world = ResidentWorld(scene_of(policy, "gae", ZERO[zero]), resumed=True, residency=residency)
        replay(world)
        assert world.saved == [1, 2] and len(world.learned) == 2
        assert not world.trainer.coming or residency == "forecast"
        memory = plan_of(world.config(), ZERO[zero], model)
        for phase, items in world.ledger.resident.items():
            found = sum(part.size for part in memory.parts if part.item in items)
            assert 0 < found <= memory.total(phase) <= memory.total(memory.tightest)
        assert (world.trainer.fetched > 0) == (residency == "forecast")


def test_optimizer_states_resident_only_in_steps_share_memory_with_activations(model):
    together, alone = (
        plan_of(ResidentWorld(scene_of("serial", "gae", 1), residency=each).config(), 1, model)
        for each in ("forecast", "step")
    )
    (states,) = {part.size for part in together.parts if part.item == Item.OPTIMIZER}  # the same for actor and critic
    assert alone.total("syncing") == together.total("syncing") - 2 * states
    assert together.total("training") - 2 * states <= alone.total("training") <= together.total("training") - states
    for phase in ("loading", "generating", "saving"):
        assert alone.total(phase) == together.total(phase)
    assert alone.moved == together.moved and alone.host == together.host


@pytest.mark.slow
@exploring
@given(
    scene=scenes(steps=1),
    residency=st.sampled_from(("training", "forecast", "step")),
    zero=st.sampled_from(sorted(ZERO.values())),
    gib=st.floats(16, 400),
    utilization=st.sampled_from((0.3, 0.6, 0.9)),
    recomputes=st.booleans(),
    alternates=st.booleans(),
)
def test_plans_that_fit_have_memory_for_all_replayed_calls(
    scene, residency, zero, gib, utilization, recomputes, alternates, model
):
    world = replay(ResidentWorld(scene, residency=residency, alternates=alternates))
    config = world.config()
    config.rollout.gpu_memory_utilization, config.model.enable_gradient_checkpointing = utilization, recomputes
    memory = plan_of(config, zero, model, gib)
    contents_of_phases = world.ledger.resident.values()
    needed = max(sum(part.size for part in memory.parts if part.item in items) for items in contents_of_phases)
    if not problems(config, memory):
        assert needed <= gib * 2**30
        assert not problems(config, plan_of(config, zero, model, 1.5 * gib)), (
            "a plan that fits also fits on a larger device"
        )


@pytest.mark.slow
@exploring
@given(scene=scenes(steps=2), alternates=st.booleans())
def test_calls_are_valid_when_engines_are_lost_at_any_time(scene, alternates):
    world = replay(ResidentWorld(scene, alternates=alternates))
    assert len(world.learned) == 2 and not any(rollout.lost for rollout in world.rollouts)


@pytest.mark.parametrize("zero", ZERO)
def test_a_replacement_engine_starts_after_the_ranks_release_the_device(zero):
    restarted = 0
    for when in (2.0, 2.5, 3.0, 3.5):
        world = replay(ResidentWorld(scene_of("stream", "grpo", ZERO[zero], lost=(when, when + 0.1, when + 0.2))))
        restarted += world.engines_restarted
    assert restarted


def test_an_engine_lost_during_a_push_is_replaced():
    world = ResidentWorld(scene_of("adaptive", "grpo", 1))
    world.rollouts[1].dies_in_push = True
    assert len(replay(world).learned) == 2 and not world.rollouts[1].lost


def test_a_trained_tower_is_pushed_to_the_encoders_after_every_step(tmp_path):
    world = replay(ResidentWorld(scene_of("adaptive", "grpo", 1), tower=tmp_path))
    assert world.encoder.updated == [1, 2, 3]


def test_a_resumed_job_loads_before_it_generates():
    assert len(replay(ResidentWorld(scene_of("adaptive", "gae", 1), resumed=True)).learned) == 2


def test_a_checkpoint_that_fails_on_a_full_disk_loses_no_engine():
    world = ResidentWorld(scene_of("adaptive", "grpo", 1))
    world.trainer.disk_is_full = True
    assert replay(world).not_saved == [1, 2] and len(world.learned) == 2


@pytest.mark.slow
@exploring
@given(
    scene=st.sampled_from(("tail_batching", "over_sampling", "partial_rollout", "one_step_off")).flatmap(
        lambda data: scenes(data=data, steps=2)
    )
)
def test_calls_are_valid_when_samples_continue_in_the_next_step(scene):
    assert len(replay(ResidentWorld(scene)).learned) == 2


async def test_parts_start_in_the_order_required_by_the_device():
    order = []

    def start(name, result=None):
        async def begin():
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ready")
            return result

        return begin

    class Ranks:
        sharing = DeviceSharing()

        async def measure(self):
            order.append("measured")
            return {"peak_flops": 1e9}

        async def release_device(self, slot):
            order.append(f"release {slot}")

    async def ranks(let_engines_start):
        if not Ranks.sharing.alternates:
            let_engines_start()
            await asyncio.sleep(0.01)
        return await start("ranks", (Ranks(), {}))()

    engines, rewards = [start("engine 0", 7), start("engine 1", 8)], [start("rewards")]
    lines = []
    part = partial(timed, say=lambda line: lines.append(line.rpartition("  ")[0]))
    towers = [start("towers")]
    gpu = await start_parts("cuda", trainer=ranks, engines=engines, towers=towers, rewards=rewards, part=part)
    assert lines == ["✓ speed of the ranks", "✓ ranks release the devices"], "work that is not a part"
    assert gpu.trainer_facts == {"peak_flops": 1e9} and gpu.engine_facts == [7, 8]
    first = [f"{name} {what}" for what in ("begins", "ready") for name in ("ranks", "towers")]
    then = [f"{name} {what}" for what in ("begins", "ready") for name in ("engine 0", "engine 1")]
    assert order == [*first, "measured", "release 0", "release 1", *then, "rewards begins", "rewards ready"]
    order.clear()
    Ranks.sharing = DeviceSharing(alternates=False)
    both = await start_parts("cuda", trainer=ranks, engines=engines, rewards=rewards)
    assert both.trainer_facts == {"peak_flops": 1e9} and both.engine_facts == [7, 8]
    assert order[:4] == then and order[4] == "ranks begins", "engines do not wait for ranks to load"
    assert order[-3:] == ["rewards begins", "rewards ready", "measured"], "reward models measure free memory"
    order.clear()
    Ranks.sharing = DeviceSharing()
    cpu = await start_parts("cpu", trainer=ranks, engines=engines, rewards=rewards)
    assert cpu.trainer_facts == {"peak_flops": 1e9} and cpu.engine_facts == [7, 8]
    starts = [order.index(f"{name} begins") for name in ("engine 0", "engine 1", "rewards", "ranks")]
    assert max(starts) < order.index("engine 0 ready"), "no part waits for another"
    assert order[-1] == "measured"


@pytest.mark.parametrize("failing", ["ranks", "engine"])
async def test_a_failed_start_cancels_the_wait_for_other_parts(failing):
    async def end(name):
        if name == failing:
            raise EngineError(f"{name}: its own cause")
        await asyncio.Event().wait()

    async def ranks(let_engines_start):
        let_engines_start()
        await end("ranks")

    with pytest.raises(EngineError, match=f"{failing}: its own cause"):
        await asyncio.wait_for(start_parts("cuda", trainer=ranks, engines=[partial(end, "engine")]), 60)


def test_sigterm_writes_a_checkpoint():
    world = ResidentWorld(scene_of("adaptive", "gae", 3), stop_after=1)
    with pytest.raises(Stopped):
        replay(world)
    assert world.saved == [1]


# Rules of the ledger --------------------------------------------------------------------------------------------------


def ledger_after(*names, alternates=True):
    ledger = ResidencyReplay(1, alternates)
    for name in names:
        with ledger.running(name, 0):
            pass
    return ledger


STARTED = ("start_ranks", "release_device", "start_engine")
WRONG = {
    "a push after the ranks left": (
        (*STARTED, "sleep", "acquire_device", "step", "release_device", "wake(weights)", "wake(kv_cache)", "push"),
        "slot 0: push needs parameters on the device. Resident: engine weights, KV cache, residents; the last",
    ),
    "an engine that starts next to the ranks": (
        ("start_ranks", "start_engine"),
        "start_engine conflicts with parameters",
    ),
    "ranks that take a device while the engine is awake": (
        (*STARTED, "acquire_device"),
        "conflicts with engine weights, KV cache",
    ),
    "a KV cache that wakes next to the ranks": (
        (*STARTED, "sleep", "acquire_device", "wake(weights)", "push", "wake(kv_cache)"),
        "wake(kv_cache) conflicts with parameters, reference, optimizer on the device",
    ),
    "a checkpoint of ranks that are away": ((*STARTED, "save"), "save needs parameters, reference, optimizer"),
    "a step without its optimizer": ((*STARTED, "sleep", "take_weights", "step"), "step needs optimizer on the device"),
    "an optimizer that loads next to the engine": ((*STARTED, "fetch_optimizer"), "needs parameters on the device"),
    "generation without a KV cache": (
        (*STARTED, "sleep", "acquire_device", "wake(weights)", "push", "release_device", "generate"),
        "generate needs KV cache on the device. Resident: engine weights, residents; the last call was release_device",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_order_of_calls_is_rejected(case):
    calls, message = WRONG[case]
    with pytest.raises(ResidencyError) as error:
        ledger_after(*calls)
    assert message in str(error.value)


@pytest.mark.parametrize("call", ["sleep", "wake(weights)", "wake(kv_cache)", "acquire_device", "release_device"])
def test_a_call_that_moves_items_is_rejected_when_engine_and_ranks_both_stay(call):
    with pytest.raises(
        ResidencyError,
        match=rf"slot 0: {re.escape(call)} would move resident items although engine and ranks both stay",
    ):
        ledger_after("start_ranks", "start_engine", "push", "generate", "accumulate", call, alternates=False)


def test_items_do_not_move_during_a_call():
    ledger = ledger_after(*STARTED)
    with ledger.running("generate", 0), pytest.raises(ResidencyError, match="sleep begins while generate is running"):
        ledger._begin("sleep", 0)


def test_an_optimizer_is_fetched_during_calls_and_nothing_is_released_meanwhile():
    ledger = ledger_after(*STARTED, "sleep", "take_weights")
    with ledger.running("accumulate", 0), ledger.running("fetch_optimizer", 0):
        with ledger.running("score", 0):
            pass
        with pytest.raises(ResidencyError, match="release_device begins while accumulate is running"):
            ledger._begin("release_device", 0)
    assert {Item.OPTIMIZER, Item.ACTIVATIONS} <= ledger.resident["training"]


def test_a_step_restores_the_contents_of_a_slot():
    assert ledger_after(*STEP).held == [{Item.ENGINE_WEIGHTS, Item.KV_CACHE, Item.RESIDENTS}]
    phases = contents()
    assert phases["generating"] == {Item.ENGINE_WEIGHTS, Item.KV_CACHE, Item.RESIDENTS}
    assert Item.PARAMETERS in phases["syncing"] and Item.ENGINE_WEIGHTS in phases["syncing"]
    assert set().union(*phases.values()) == set(Item)


@pytest.mark.parametrize("optimizers_alone", [False, True])
@pytest.mark.parametrize("alternates", [False, True])
def test_the_planned_items_equal_a_replayed_step(optimizers_alone, alternates):
    assert contents(optimizers_alone, alternates) == replayed_contents(optimizers_alone, alternates)


class EndedByRewards(ResidentWorld):
    """A run that rewards end in step 3, or in the validation after step 2; it writes a checkpoint only then."""

    def __init__(self, scene, how):
        super().__init__(scene)
        self.how, self.events = how, []

    def config(self):
        config = super().config()
        config.trainer.save_freq = -1
        return config

    def fail(self, how, error):
        if self.how == how and len(self.learned) == (2 if how != "validation" else 1):
            raise error

    def check(self, step, board):
        self.fail("validation" if board.purpose == "testing" else "too many fail", RewardError("rewards"))

    async def score(self, samples):
        if self.board.purpose == "training":
            self.fail("a process is lost permanently", EngineError("rewards"))
        return await super().score(samples)

    async def write(self, step, required=False):
        assert required and (self.how == "validation" or not any(self.trainer.steps.values()))
        assert not any(rollout.held for rollout in self.rollouts)
        self.events.append("write")
        await super().write(step)

    def log_step(self, step, board, spans):
        super().log_step(step, board, spans)
        self.events.append(step)

    def publish(self):
        if self.saved:
            self.events.append("publish")

    async def publish_written(self):
        self.publish()

    async def settle(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["too many fail", "a process is lost permanently", "validation"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("zero", ["ZeRO 1", "pipelines"])
def test_a_run_ended_by_rewards_has_a_checkpoint_of_the_last_complete_step(zero, policy, how):
    scene = replace(scene_of(policy, "gae", ZERO[zero]), steps=4, mini_batch=2)
    world = EndedByRewards(scene, how)
    with pytest.raises((RewardError, EngineError), match=r"^rewards$"):
        run_virtual(world.run())
    assert world.saved == [2]
    assert world.events == ([1, "write", 2, "publish"] if how == "validation" else [1, 2, "write", "publish"])
