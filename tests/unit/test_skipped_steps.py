"""Optimizer steps with a non-finite gradient are skipped without side effects, in all ZeRO stages and pipelines."""

import math

import pytest
import torch
from small_network import Network, loss
from test_moves import DTYPES, PAIRS, accumulate, assert_same, engine, group, run, same, saved, stages, states_of  # noqa: F401
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.config.schema import ActorConfig, Config, OptimConfig
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.optimizer import take_step, trainable
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_rank import PipelineRank
from rlfuse.engines.trainer.micro_batch_losses import weighted_loss
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.errors import EngineError
from rlfuse.run_folder import checkpoints

BROKEN = (math.nan, -math.inf)


def accumulate_non_finite(engine, value):
    """Run a backward pass with non-finite gradients."""
    x = torch.ones(1, 6, dtype=engine.module.dtype)
    engine.backward((engine(x)[0, 0] * value).float(), scale_wrt_gas=False)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_a_skipped_step_changes_no_state(tmp_path, stage, dtype):
    """Compare weights, moments and learning rate, for the first step and later ones."""
    clean, skipped = engine(stage, dtype), engine(stage, dtype)
    for i, value in enumerate(BROKEN):
        accumulate(skipped, [9])
        accumulate_non_finite(skipped, value)
        assert not math.isfinite(take_step(skipped, 2.0, 1)) and skipped.skipped_steps == i + 1
        norms = []
        for each in (clean, skipped):
            accumulate(each, [i])
            norms.append(take_step(each, 2.0, 1))
        assert norms[0] == norms[1] > 0
    ours, theirs = saved(skipped, tmp_path / "skipped"), saved(clean, tmp_path / "clean")
    assert_same(ours, theirs)
    assert all(tensor.isfinite().all() for tensor in ours.values()) and skipped.get_lr() == clean.get_lr()


class NetworkWithTower(Network):
    """A network whose last layer receives its gradient at the end of a step, as a trained tower does."""

    def forward(self, x):
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](x * self.scale))))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_parameters_outside_the_first_backward_do_not_keep_old_gradients(stage):
    settings = ActorConfig(zero_stage=stage, grad_clip=0.0)
    model, norms = DeepSpeedModel(trainable(NetworkWithTower(), settings, OptimConfig(lr=0.0), "cpu"), 1), []
    for factor in (3.0, 1.0, 3.0):
        for seed in (0, 1):
            model.backward(loss(model.engine, seed))
        tower = list(model.module.layers[2].parameters())
        with model.gathered(tower):
            model.backward(factor * sum(each.sum() for each in tower))
        norms.append(model.step(1.0, 1.0)["grad_norm"])
    assert norms[0] == norms[2] > norms[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_of_pipelines_changes_no_state(tmp_path, dtype):
    (clean, one), (skipped, other) = stages(dtype), stages(dtype)
    for i, value in enumerate(BROKEN):
        run(other, [9])
        (other(torch.ones(1, 6, dtype=other.dtype).requires_grad_())[0, 0] * value).float().backward()
        assert not math.isfinite(take_step(skipped, 2.0, 1)) and skipped.skipped_steps == i + 1
        norms = []
        for each, network in ((clean, one), (skipped, other)):
            run(network, [i])
            norms.append(take_step(each, 2.0, 1))
        assert norms[0] == norms[1] > 0
    assert same(states_of(skipped, tmp_path / "skipped"), states_of(clean, tmp_path / "clean"))


@pytest.mark.parametrize("value", BROKEN)
def test_a_non_finite_loss_has_a_non_finite_gradient(value):
    """Check a non-finite constant too, which does not affect the gradient otherwise."""
    for constant, gradient in ((0.0, 0.5), (value, math.nan)):
        weight = torch.ones(3, requires_grad=True)
        weighted_loss(weight.sum() + constant, 0.5).backward()
        assert torch.allclose(weight.grad, torch.tensor(gradient), equal_nan=True)


def rank_of(kind, stage, dtype):
    """Return a rank with one small model, and the arguments of its `save` after the folder."""
    rank = kind(Config(), 0, 1, "cpu")
    if kind is PipelineRank:
        rank.engines, rank.layout = {"actor": DeepSpeedModel(stages(dtype)[0], 1)}, {"actor": Pipelines("actor", 1)}
        return rank, ()
    settings, sizes = ActorConfig(zero_stage=stage), dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_attention_heads=2, **sizes)).to(DTYPES[dtype])
    rank.engines, rank.tower = (
        {"actor": DeepSpeedModel(trainable(model, settings, OptimConfig(lr=1e-2), "cpu"), 1)},
        None,
    )
    rank.exporters = {"actor": Exporter(model, 0, sharded=rank.engines["actor"])}
    return rank, ({"actor": [list(rank.exporters["actor"].tensors)]},)


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage", [*((TrainerRank, stage) for stage in range(4)), (PipelineRank, 1)])
async def test_non_finite_weights_replace_no_checkpoint(tmp_path, kind, stage):
    rank, more = rank_of(kind, stage, "bfloat16")

    async def fill(folder):
        assert rank.save(folder, *more) is None

    await checkpoints.write(tmp_path, 1, {}, fill)
    checkpoints.publish(tmp_path, 1, 1)
    weight = next(iter(rank.engines["actor"].module.parameters()))
    getattr(weight, "ds_tensor", weight).data.view(-1)[3] = math.nan
    with pytest.raises(EngineError, match=r"The actor is not saved, as its weights are not finite \(\S+\)"):
        await checkpoints.write(tmp_path, 2, {}, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1", "latest_checkpointed_iteration.txt"]
