"""What a resumed trainer goes on with: the state of the checkpoint under the settings of the run that loads it."""

import dataclasses
import math

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from test_moves import DTYPES, group  # noqa: F401
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.config.schema import ActorConfig, Config, OptimConfig
from rlfuse.engines.pipeline.layout import Pipelines, Place
from rlfuse.engines.pipeline.pipeline_rank import PipelineRank
from rlfuse.engines.pipeline.stages import DeviceStages
from rlfuse.engines.trainer.optimizer import take_step, trainable
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.engines.weights.exporting import Exporter
from rlfuse.run.job import Job
from rlfuse.run.wiring import updates

STEPS = 4
KINDS = [(TrainerRank, 0, "float32"), (TrainerRank, 0, "bfloat16"), (TrainerRank, 1, "bfloat16")]
KINDS += [(TrainerRank, 2, "float32"), (TrainerRank, 3, "bfloat16"), (PipelineRank, 1, "float32")]


def rank_of(kind, stage, dtype, lr, **actor):
    """A rank with one small actor, always the same; what takes inputs, and what `save` is called with."""
    torch.manual_seed(1)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=16, tie_word_embeddings=False)
    model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=2, num_key_value_heads=2, **sizes)).to(DTYPES[dtype])
    rank, settings = kind(Config(), 0, 1, "cpu"), ActorConfig(zero_stage=stage, **actor)
    if kind is PipelineRank:
        rank.engines = {"actor": trainable(DeviceStages({"0": model}), settings, lr, STEPS, "cpu")}
        rank.layout, rank.place = {"actor": Pipelines("actor", 1)}, Place(0, 0, 0)
        return rank, model, ()
    rank.engines, rank.tower = {"actor": trainable(model, settings, lr, STEPS, "cpu")}, None
    rank.exporters = {"actor": Exporter(model, 0)}
    return rank, rank.engines["actor"], ({"actor": [list(rank.exporters["actor"].tensors)]},)


def step(rank, model):
    """One optimizer step; the gradient's norm before clipping."""
    loss = model(input_ids=torch.arange(8)[None]).logits.float().log_softmax(-1)[..., 3].sum()
    rank.engines["actor"].backward(loss, scale_wrt_gas=False)
    return take_step(rank.engines["actor"], 10.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage, dtype", KINDS)
def test_a_new_rate_schedule_decay_and_clipping_are_what_the_optimizer_uses(tmp_path, kind, stage, dtype):
    writer, model, more = rank_of(kind, stage, dtype, lr=1e-2, grad_clip=1.0)
    step(writer, model)
    assert writer.save(tmp_path, *more) is None
    optim = OptimConfig(weight_decay=0.5, lr_warmup_steps=2, lr_scheduler_type="cosine")
    reader, model, _ = rank_of(kind, stage, dtype, lr=1e-3, grad_clip=0.25, optim=optim)
    reader.load(tmp_path)
    actor, rates = reader.engines["actor"], []
    for _ in range(STEPS):
        rates += actor.get_lr()
        assert {each["weight_decay"] for each in actor.optimizer.param_groups} == {0.5}
        assert getattr(actor.optimizer, "clip_grad", 0.25) == 0.25
        assert math.isfinite(step(reader, model))
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 0.0]), "from the second step of warm-up to the end of the cosine"


def test_a_checkpoint_asks_for_nothing_but_weights_under_any_python(tmp_path, monkeypatch):
    by_name = lambda stage, _: (getattr, (ZeroStageEnum, stage.name))  # noqa: E731
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)  # as before Python 3.11.4
    writer, model, more = rank_of(TrainerRank, 1, "bfloat16", lr=1e-2)
    step(writer, model)
    assert writer.save(tmp_path, *more) is None
    monkeypatch.undo()
    rank_of(TrainerRank, 1, "bfloat16", lr=1e-2)[0].load(tmp_path)


def test_what_zero_1_saved_goes_on_under_zero_2(tmp_path):
    writer, model, more = rank_of(TrainerRank, 1, "bfloat16", lr=1e-2)
    step(writer, model)
    assert writer.save(tmp_path, *more) is None
    expected = [step(writer, model) for _ in range(2)]
    reader, model, _ = rank_of(TrainerRank, 2, "bfloat16", lr=1e-2)
    reader.load(tmp_path)
    assert [step(reader, model) for _ in range(2)] == expected


def test_a_schedule_ends_with_the_run_whatever_number_of_updates_batches_had(tmp_path):
    config = Config()
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = 8, 2, 2
    first = Job(config, tmp_path, None, {"step": 0}, 0.0)
    assert updates(first, 20) == 160
    fewer = dataclasses.replace(config, actor=dataclasses.replace(config.actor, ppo_mini_batch_size=8, ppo_epochs=1))
    second = Job(fewer, tmp_path, None, {"step": 10, "updates": updates(first, 10)}, 0.0)
    assert updates(second, 20) == 80 + 10, "not 20, which was over long before: a cosine would have ended at 0"
    third = dataclasses.replace(second, state={"step": 15, "updates": updates(second, 15)})
    assert updates(third, 20) == 90
    assert updates(dataclasses.replace(first, state={"step": 5}), 20) == 160, "an older checkpoint tells nothing"
