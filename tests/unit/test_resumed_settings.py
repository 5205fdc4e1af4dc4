"""A resumed trainer has the state of the checkpoint and the settings of the run that loads it."""

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param
from test_moves import DTYPES, group  # noqa: F401
from transformers import Qwen2Config, Qwen2ForCausalLM
from worlds.playing import prompts

from rlfuse.config.schema import ActorConfig, Config, OptimConfig
from rlfuse.data.prompts import PromptSource
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.optimizer import set_lr, take_step, trainable
from rlfuse.engines.pipeline.layout import Pipelines
from rlfuse.engines.pipeline.pipeline_rank import PipelineRank
from rlfuse.engines.pipeline.stages import DeviceStages
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.fusion.selection import Selection
from rlfuse.run.build import _restore
from rlfuse.run.job import Job

KINDS = [(TrainerRank, 0, "float32"), (TrainerRank, 0, "bfloat16"), (TrainerRank, 1, "bfloat16")]
KINDS += [(TrainerRank, 2, "float32"), (TrainerRank, 3, "bfloat16"), (PipelineRank, 1, "float32")]


def small_model(dtype):
    torch.manual_seed(1)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=16, tie_word_embeddings=False)
    return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **sizes)).to(DTYPES[dtype])


def rank_of(kind, stage, dtype, lr, optim=None, **actor):
    """Return a rank with a small fixed actor, the callable model, and further arguments of `save`."""
    model = small_model(dtype)
    config, settings = Config(), ActorConfig(zero_stage=stage, **actor)
    optim = dataclasses.replace(optim or OptimConfig(), lr=lr)
    config.model.dtype = dtype
    rank = kind(config, 0, 1, "cpu")
    if kind is PipelineRank:
        rank.engines = {"actor": DeepSpeedModel(trainable(DeviceStages({"0": model}), settings, optim, "cpu"), 1)}
        rank.layout = {"actor": Pipelines("actor", 1)}
        return rank, model, ()
    rank.engines, rank.tower = {"actor": DeepSpeedModel(trainable(model, settings, optim, "cpu"), 1)}, None
    rank.exporters = {"actor": Exporter(model, 0, sharded=rank.engines["actor"])}
    return rank, rank.engines["actor"], ({"actor": [list(rank.exporters["actor"].tensors)]},)


def step(rank, model, lr_factor=1.0):
    """Take one optimizer step; return the gradient norm before clipping."""
    engine = rank.engines["actor"].engine
    set_lr(engine, lr_factor)
    loss = model(input_ids=torch.arange(8)[None]).logits.float().log_softmax(-1)[..., 3].sum()
    engine.backward(loss, scale_wrt_gas=False)
    return take_step(engine, 10.0, 1)


def weights_of(rank):
    """Return the first parameter of the optimizer in float32."""
    parameter = next(rank.engines["actor"].module.parameters())
    master = safe_get_full_fp32_param(parameter)
    return (parameter if master is None else master).detach().float().clone()


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage, dtype", KINDS)
def test_the_optimizer_uses_the_new_learning_rate_weight_decay_and_clipping(tmp_path, kind, stage, dtype):
    writer, model, more = rank_of(kind, stage, dtype, lr=1e-2, grad_clip=1.0)
    step(writer, model)
    assert writer.save(tmp_path, *more) is None
    optim = OptimConfig(weight_decay=0.5, betas=[0.8, 0.95], eps=1e-6)
    reader, model, _ = rank_of(kind, stage, dtype, lr=1e-3, grad_clip=0.25, optim=optim)
    reader.load(tmp_path)
    if kind is TrainerRank:
        numel = sum(size for _, size in reader.sizes("actor")) // DTYPES[dtype].itemsize
        assert reader._matmul_parameters("actor") == (numel - 2 * 16 * 16, 16 * 16), "all but the embedding"
    actor = reader.engines["actor"].engine
    weights = [weights_of(reader)]
    for factor in (0.0, 0.5, 1.0):
        assert math.isfinite(step(reader, model, factor))
        used = {tuple(each[name] for name in optim.adamw) for each in actor.optimizer.param_groups}
        assert used == {(1e-3 * factor, 0.5, (0.8, 0.95), 1e-6)}
        assert actor.get_lr() == [1e-3 * factor] and getattr(actor.optimizer, "clip_grad", 0.25) == 0.25
        weights.append(weights_of(reader))
    moved = [(after - before).abs().max().item() for before, after in pairwise(weights)]
    assert moved[0] == 0 and 0 < moved[1] < 1e-3 and moved[1] < moved[2], "each step uses its learning rate"


def test_a_checkpoint_loads_with_weights_only_under_any_python(tmp_path, monkeypatch):
    by_name = lambda stage, _: (getattr, (ZeroStageEnum, stage.name))  # noqa: E731
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)  # as before Python 3.11.4
    writer, model, more = rank_of(TrainerRank, 1, "bfloat16", lr=1e-2)
    step(writer, model)
    assert writer.save(tmp_path, *more) is None
    monkeypatch.undo()
    rank_of(TrainerRank, 1, "bfloat16", lr=1e-2)[0].load(tmp_path)


def test_a_checkpoint_of_zero_1_resumes_under_zero_2(tmp_path):
    writer, model, more = rank_of(TrainerRank, 1, "bfloat16", lr=1e-2)
    step(writer, model)
    assert writer.save(tmp_path, *more) is None
    expected = [step(writer, model) for _ in range(2)]
    reader, model, _ = rank_of(TrainerRank, 2, "bfloat16", lr=1e-2)
    reader.load(tmp_path)
    assert [step(reader, model) for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("exact", ["2 prompts that were deferred", "(rows 5, 7 of data.train_files)", "fusion.data=over_sampling"]),
        ("over_sampling", []),
    ],
)
def test_a_resume_reports_prompts_that_it_skips(data, expected):
    selection, messages = Selection(data, 0.5, 4, PromptSource(prompts(8), 4, False, 0)), []
    state = {"selection": {"again": [7, 5, 7], "new": []}}
    job = Job(Config(), Path(), Path("global_step_2"), state, 0.0)
    _restore({"selection": selection}, job, selection, messages.append)
    assert len(messages) == bool(expected) and all(part in messages[0] for part in expected)
    _restore({}, dataclasses.replace(job, checkpoint=None), selection, messages.append)
    assert len(messages) == bool(expected)
