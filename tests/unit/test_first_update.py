"""The first AdamW updates have the size of the learning rate, for every ZeRO stage and dtype and in pipelines."""

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from test_moves import DTYPES, PAIRS, group  # noqa: F401
from test_resumed_settings import rank_of, small_model, step

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config, OptimConfig
from rlfuse.engines.fsdp2.fsdp2_model import Fsdp2Model
from rlfuse.engines.pipeline.pipeline_rank import PipelineRank
from rlfuse.engines.trainer.trainer_rank import TrainerRank

RATE, DECAY = 1e-3, 0.5
KINDS = [(TrainerRank, *pair) for pair in PAIRS]
KINDS += [(PipelineRank, 1, dtype) for dtype in DTYPES]


def master_weights(rank):
    """Return the float32 master weights of the actor."""
    engine = rank.engines["actor"].engine
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() == 0:
        parameters = engine.basic_optimizer.param_groups[0]["params"]
        return [each.detach().clone() for each in parameters]
    return [safe_get_full_fp32_param(each).clone() for each in parameters]


def steps_of(rank):
    """Return the set of step counts in the optimizer state."""
    return {int(each["step"]) for each in rank.engines["actor"].engine.basic_optimizer.state.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage, dtype", KINDS)
def test_an_update_changes_weights_by_the_learning_rate_and_resumes(tmp_path, kind, stage, dtype):
    settings = dict(lr=RATE, grad_clip=0.0, optim=OptimConfig(weight_decay=DECAY))
    rank, model, more = rank_of(kind, stage, dtype, **settings)
    before = master_weights(rank)
    if stage < 3:  # with ZeRO 3, weights are sharded
        assert all(map(torch.equal, before, [each.float() for each in getattr(model, "module", model).parameters()]))
    step(rank, model)
    changes = [new - old * (1 - RATE * DECAY) for old, new in zip(before, master_weights(rank), strict=True)]
    sizes = torch.cat([change.flatten().abs() / RATE for change in changes])
    sizes = sizes[sizes > 0.5]  # other gradients are zero or as small as AdamW's epsilon
    assert len(sizes) > 100 and sizes.max() < 1.001 and (sizes > 0.99).float().mean() > 0.95
    assert steps_of(rank) == {1}
    assert rank.save(tmp_path, *more) is None
    resumed, its_model, _ = rank_of(kind, stage, dtype, **settings)
    resumed.load(tmp_path)
    assert steps_of(resumed) == {1}
    for each, its in ((rank, model), (resumed, its_model)):
        step(each, its)
    assert steps_of(resumed) == {2} and all(map(torch.equal, master_weights(rank), master_weights(resumed)))


def loss_of(model):
    return model(input_ids=torch.arange(8)[None]).logits.log_softmax(-1)[..., 3].sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage", [(TrainerRank, 0), (TrainerRank, 2), (PipelineRank, 1), ("fsdp2", 0)])
def test_updates_follow_adamw_with_these_betas_and_eps(kind, stage):
    (first, second), eps = (0.6, 0.8), 1e-3
    optim = OptimConfig(weight_decay=0.0, betas=[first, second], eps=eps)
    plain = small_model("float32")
    gradients = torch.autograd.grad(loss_of(plain), [*plain.parameters()])
    if kind == "fsdp2":
        optim.lr, config = RATE, Config()
        config.actor.grad_clip, config.model.dtype = 0.0, "float32"
        model = engine = Fsdp2Model.trained(small_model("float32"), config, optim, "cpu", ParallelMesh())
        weights = lambda: [each.full_tensor().detach().clone() for each in engine.module.parameters()]  # noqa: E731
    else:
        rank, model, _ = rank_of(kind, stage, "float32", lr=RATE, grad_clip=0.0, optim=optim)
        engine, weights = rank.engines["actor"], lambda: master_weights(rank)
    before = weights()
    for count, factor in ((10.0, 0.0), (5.0, 0.5)):
        engine.backward(loss_of(model))
        engine.step(count, factor)
    for old, new, gradient in zip(before, weights(), gradients, strict=True):
        of_two = [gradient / 10, gradient / 5]
        moment = (first * (1 - first) * of_two[0] + (1 - first) * of_two[1]) / (1 - first**2)
        square = (second * (1 - second) * of_two[0] ** 2 + (1 - second) * of_two[1] ** 2) / (1 - second**2)
        torch.testing.assert_close(new - old, -0.5 * RATE * moment / (square.sqrt() + eps), rtol=1e-3, atol=1e-7)
