"""Synchronisation of the reference policy with the actor: in every layout, in checkpoints and after a resume."""

import asyncio

import numpy as np
import pytest
import torch
from test_moves import DTYPES, group  # noqa: F401
from test_resumed_settings import small_model
from transformers import Qwen2ForCausalLM
from worlds.playing import PATIENCE_S, World
from worlds.scenes import Scene

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config, OptimConfig
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.fsdp2.fsdp2_model import Fsdp2Model
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.errors import EngineError
from rlfuse.samples import MicroBatch, Row
from rlfuse.simulate.clock import run_virtual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow), "fsdp2"])
def test_reference_weights_are_mixed_with_those_of_the_actor(stage, dtype):
    config, alpha = Config(), 0.25
    config.model.dtype = dtype
    backend = Fsdp2Model if stage == "fsdp2" else DeepSpeedModel
    config.actor.zero_stage = 1 if stage == "fsdp2" else stage
    models, initial = [], []
    for scale in (1.0, -2.0):
        model = small_model(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        initial.append({name: each.detach().clone() for name, each in model.named_parameters()})
        models.append(model)
    actor = backend.trained(models[0], config, OptimConfig(), "cpu", ParallelMesh())
    frozen = backend.frozen(models[1], config, "cpu")
    actor.mix_into(frozen, alpha)
    for model, expected in (
        (actor, initial[0]),
        (
            frozen,
            {name: alpha * initial[0][name].float() + (1 - alpha) * initial[1][name].float() for name in initial[0]},
        ),
    ):
        names, tensors = zip(*model.module.named_parameters(), strict=True)
        with model.gathered(tensors) as gathered:
            for name, found in zip(names, gathered, strict=True):
                torch.testing.assert_close(found, expected[name].to(found.dtype))


def row():
    rng = np.random.default_rng(0)
    draw = lambda loc: rng.normal(loc, 0.3, 6).astype(np.float32)  # noqa: E731
    tensors = {"old_log_probs": draw(-3), "advantages": draw(0), "ref_log_probs": draw(-3)}
    return Row(np.arange(3, dtype=np.int32), np.arange(4, 10, dtype=np.int32), tensors, id="0")


def rank_of(folder, stage, dtype):
    config = Config()
    config.model.path, config.model.dtype = str(folder), dtype
    config.algorithm.adv_estimator, config.actor.use_kl_loss = "grpo", True
    config.actor.strategy = "fsdp2" if stage == "fsdp2" else "deepspeed"
    config.actor.zero_stage = 1 if stage == "fsdp2" else stage
    config.actor.optim.lr, config.ref.sync_ref_model, config.ref.ref_model_mixup_alpha = 0.02, True, 0.25
    rank = TrainerRank(config, 0, 1, "cpu")
    rank.meet_groups()
    rank.setup()
    return rank


def train_and_sync(rank):
    """Return the log-probs of the reference before and after another update of the actor."""
    batch = [MicroBatch((row(),))]
    scores = lambda: rank.score(("ref",), batch)["ref"][0][0][0]  # noqa: E731
    before = scores()
    rank.accumulate(("actor",), batch)
    rank.step("actor", 6.0)
    rank.sync_reference()
    return [before, scores()]


def bytes_of_tensors(folder):
    """Return the bytes of all safetensors files without their headers."""
    found = [file.read_bytes() for file in folder.rglob("*.safetensors")]
    return sum(len(each) - 8 - int.from_bytes(each[:8], "little") for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "bfloat16"), (1, "float32"), (2, "bfloat16"), (3, "float32"), ("fsdp2", "bfloat16")]
)
def test_a_resumed_run_continues_with_the_mixed_reference(tmp_path, stage, dtype):
    small_model(dtype).save_pretrained(tmp_path / "start")
    rank = rank_of(tmp_path / "start", stage, dtype)
    train_and_sync(rank)
    assert (
        rank.save(tmp_path / "saved", {name: [[each for each, _ in rank.sizes(name)]] for name in ("actor", "ref")})
        is None
    )
    assert bytes_of_tensors(tmp_path / "saved") == sum(rank.checkpoint_bytes())
    weights = {
        name: dict(Qwen2ForCausalLM.from_pretrained(tmp_path / place, dtype=torch.float32).named_parameters())
        for name, place in (("start", "start"), ("actor", "saved/actor/huggingface"), ("ref", "saved/ref/huggingface"))
    }
    tolerance = {"float32": 1e-6, "bfloat16": 8e-3}[dtype]
    for name, found in weights["ref"].items():
        actor, start = weights["actor"][name], weights["start"][name]
        torch.testing.assert_close(found, 0.25 * actor + 0.75 * start, rtol=tolerance, atol=tolerance)
    assert not torch.equal(weights["ref"]["lm_head.weight"], weights["start"]["lm_head.weight"])
    expected = train_and_sync(rank)
    resumed = rank_of(tmp_path / "start", stage, dtype)
    resumed.load(tmp_path / "saved")
    np.testing.assert_array_equal(train_and_sync(resumed), expected)
    assert not np.array_equal(*expected)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shards"), [(0, 1), (1, 4)])
def test_a_host_stages_states_of_its_ranks_and_the_first_host_exported_models(tmp_path, stage, shards):
    small_model("float32").save_pretrained(tmp_path / "start")
    rank = rank_of(tmp_path / "start", stage, "float32")
    states, exported = rank.checkpoint_bytes()
    rank.world, rank.config.trainer.n_gpus_per_node = 8, 2
    for rank.rank, expected in ((1, states // shards + exported), (2, states // shards)):
        assert rank._bytes_of_host() == expected


def test_a_reference_with_other_parameters_is_rejected(tmp_path):
    small_model("float32").save_pretrained(tmp_path / "start")
    other = small_model("float32").config
    other.intermediate_size = 24
    Qwen2ForCausalLM(other).save_pretrained(tmp_path / "other")
    rank = rank_of(tmp_path / "start", 0, "float32")
    rank.config.ref.path = str(tmp_path / "other")
    with pytest.raises(EngineError, match=r"only one of them has model.layers.0.mlp.*Set ref.path="):
        rank.setup()


@pytest.mark.parametrize("policy", ["serial", "adaptive"])
def test_the_reference_is_synchronised_only_after_complete_steps(policy):
    scene = Scene(policy, batch=4, mini_batch=2, epochs=1, estimator="gae", steps=5, prompts=20)
    world, synced = World(scene), []
    settings = world.config

    def config():
        found = settings()
        found.algorithm.use_kl_in_reward = found.ref.sync_ref_model = True
        found.ref.ref_model_sync_steps = 2
        return found

    async def sync_reference():
        synced.append(world.stopping.step)

    world.config, world.trainer.sync_reference = config, sync_reference
    world.experience.config = config()
    run_virtual(asyncio.wait_for(world.run(), PATIENCE_S))
    assert synced == [2, 4]
