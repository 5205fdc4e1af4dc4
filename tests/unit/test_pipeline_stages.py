"""Layouts, partitions, splitting of rows and of the backward pass: the parts of pipelines that need no process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_models import Clip
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.config.schema import Config
from rlfuse.engines.pipeline import split_backward
from rlfuse.engines.pipeline.layout import Pipelines, block_size
from rlfuse.engines.pipeline.loading import load_stage
from rlfuse.engines.pipeline.partition import balanced, modelled_costs, parts
from rlfuse.engines.pipeline.pipeline_group import forward_only
from rlfuse.engines.pipeline.stages import Stage
from rlfuse.engines.trainer.attention import attend_by_layout
from rlfuse.engines.trainer.micro_batches import split_evenly
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.passes import actor_loss
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.samples import MicroBatch, Row, Visual
from rlfuse.tasks.small_video_models import write_small_qwen25_vl


def test_stages_stand_down_or_up_their_pipeline():
    down, up = Pipelines("actor", 4), Pipelines("critic", 2, 2, "up")
    assert [down.device(0, stage) for stage in range(4)] == [0, 1, 2, 3]
    assert [[up.device(pipeline, stage) for stage in range(2)] for pipeline in range(2)] == [[1, 0], [3, 2]]
    assert [up.pipeline(device) for device in range(4)] == [0, 0, 1, 1]
    assert [up.stages_on(device) for device in range(4)] == [(1,), (0,), (1,), (0,)]


def test_two_chunks_stand_in_a_v():
    v = Pipelines("actor", 3, chunks=2)
    assert [v.device(0, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert v.stages_on(0) == (0, 5)
    up = Pipelines("actor", 3, direction="up", chunks=2)
    assert [up.device(0, stage) for stage in range(6)] == [2, 1, 0, 0, 1, 2]


def test_results_go_forward_in_f_backward_in_b_and_nowhere_in_w():
    model = Pipelines("actor", 3)
    at = lambda stage, kind: Operation("actor", 0, stage, 0, kind)  # noqa: E731
    assert [(model.source(at(s, "F")), model.target(at(s, "F"))) for s in range(3)] == [(None, 1), (0, 2), (1, None)]
    assert [(model.source(at(s, "B")), model.target(at(s, "B"))) for s in range(3)] == [(1, None), (2, 0), (None, 1)]
    assert model.source(at(1, "W")) is model.target(at(1, "W")) is None


def test_layouts_that_do_not_fit_say_so():
    assert block_size([Pipelines("actor", 4), Pipelines("critic", 2, 2)], 8) == 4
    with pytest.raises(ValueError, match="make these equal"):
        block_size([Pipelines("actor", 4), Pipelines("critic", 2)], 4)
    with pytest.raises(ValueError, match="6 ranks are no whole number of blocks of 4"):
        block_size([Pipelines("actor", 4)], 6)
    with pytest.raises(ValueError, match="chunks=3"):
        Pipelines("actor", 2, chunks=3)
    with pytest.raises(ValueError, match="names 2 stages, not 4"):
        Pipelines("actor", 2, chunks=2, layers=(3, 1))


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 30), st.integers(1, 4))
def test_balanced_stages_are_the_best_cut(layers, embedding, head, stages):
    if len(layers) < stages - 1:
        with pytest.raises(ValueError, match=f"{len(layers)} layers can't make {stages} stages"):
            balanced(layers, embedding, head, stages)
        return

    def slowest(sizes):
        at, costs = 0, []
        for size in sizes:
            costs.append(sum(layers[at : at + size]))
            at += size
        costs[0] += embedding
        costs[-1] += head
        return max(costs)

    def cuts(left, stages):
        if stages == 1:
            yield (left,)
            return
        for size in range(1, left + 1):
            yield from ((size, *rest) for rest in cuts(left - size, stages - 1))

    sizes = balanced(layers, embedding, head, stages)
    assert sum(sizes) == len(layers) and len(sizes) == stages and all(sizes[:-1])
    assert slowest(sizes) == min(slowest(cut) for cut in cuts(len(layers), stages))


def test_a_wide_vocabulary_takes_layers_off_the_last_stage():
    class Config:
        hidden_size, intermediate_size, num_hidden_layers = 896, 4864, 24  # Qwen2.5 0.5B
        num_attention_heads, num_key_value_heads, vocab_size = 14, 2, 151_936

    policy = balanced(*modelled_costs(Config, Config.vocab_size), 4)
    assert policy == (7, 7, 7, 3)
    assert balanced(*modelled_costs(Config, 1), 4) == (6, 6, 6, 6)
    assert [(part.layers, part.first, part.last) for part in parts((2, 0))] == [
        (range(2), True, False),
        (range(2, 2), False, True),
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 5))
def test_every_row_gets_one_pipeline_and_micro_batch(lengths, pipelines, count):
    plan = split_evenly(lengths, pipelines, count)
    assert [len(bins) for bins in plan] == [count] * pipelines
    assert sorted(i for bins in plan for bin in bins for i in bin) == list(range(len(lengths)))


def test_forward_only_schedules_pass_every_stage():
    rows = forward_only(Pipelines("ref", 2, 2, "up"), 3)
    assert [{(op.pipeline, op.stage) for op in row} for row in rows] == [{(0, 1)}, {(0, 0)}, {(1, 1)}, {(1, 0)}]
    assert all([op.micro_batch for op in row] == [0, 1, 2] and {op.kind for op in row} == {"F"} for row in rows)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_split_backward_gives_autograds_gradients(checkpointing):
    """Inputs' gradients at once, linear weights' and biases' later, twice over so that they add up."""

    def network():
        torch.manual_seed(0)
        linear = torch.nn.Linear
        return torch.nn.Sequential(linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), linear(8, 5, bias=False))

    whole, split, tape = network(), network(), split_backward.Tape()
    split_backward.split_linears(split, tape)
    pending = []
    for seed in (1, 2):
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(seed))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        run = lambda y: torch.utils.checkpoint.checkpoint(split, y, use_reentrant=False)  # noqa: E731
        tape.deferring = True
        (run if checkpointing else split)(ours).square().sum().backward()
        pending.append(tape.take())
        whole(theirs).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert split[0].weight.grad is None and split[3].weight.grad is None and len(pending[0]) == 2
    for each in pending:
        split_backward.run(each)
        assert each == []
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.fixture(scope="module")
def tiny_policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    small = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=40, num_hidden_layers=3, **small)).save_pretrained(folder)
    return str(folder)


def two_stages(path, packed=True, checkpointing=False, visual=()):
    """Of an actor: layers 0 and 1, layer 2; with a micro-batch of two rows, the first with these clips."""
    config, ids = Config(), np.arange(3, 20, dtype=np.int32)
    config.model.dtype, config.model.enable_gradient_checkpointing = "float32", checkpointing
    rows = [
        Row(ids[:prompt], ids[:response], dict.fromkeys(("old_log_probs", "advantages"), np.ones(response, np.float32)))
        for prompt, response in ((9, 3), (4, 5))
    ]
    rows[0] = replace(rows[0], visual=visual)
    models = [load_stage(path, config.model, "cpu", part, False).train() for part in parts((2, 1))]
    stages = [Stage(config, "actor", m, part, packed, "cpu") for m, part in zip(models, parts((2, 1)), strict=True)]
    for stage in stages:
        stage.begin([MicroBatch(rows, 1.0)])
    return stages


@pytest.mark.parametrize("packed", [True, False])
def test_clips_stand_on_the_first_stage_as_in_the_whole_model(tiny_policy, packed):
    clip = Clip("clip", torch.randn(4, 16, generator=torch.Generator().manual_seed(0)))
    visual = (Visual(np.array([1, 2, 4, 5], np.int32), clip),)
    first, last = two_stages(tiny_policy, packed, visual=visual)
    whole = Qwen2ForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    batch = collate(first.micro_batches[0].rows, packed)
    actor_loss(first.config, attend_by_layout(whole), batch)[0].backward()
    for split in (False, True):
        last.forward(0, first.forward(0, None, True), True)
        first.backward(0, last.backward(0, None, whole=not split), whole=not split)
        for stage in (first, last):
            if split:
                stage.weight_gradients(0)
            for name, parameter in stage.model.named_parameters():
                torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
            stage.model.zero_grad()
            stage.begin(stage.micro_batches)


def test_a_model_whose_base_is_no_stack_of_layers_is_refused(tmp_path):
    folder = write_small_qwen25_vl(tmp_path)
    with pytest.raises(ValueError, match=r"Qwen2_5_VLForCausalLM has no embed_tokens.* without pipeline parallelism"):
        load_stage(str(folder), Config().model, "cpu", parts((1, 1))[0], False)


@pytest.mark.parametrize("packed, positions", [(True, 3 + 5), (False, 2 * 8)])
def test_the_head_sees_only_positions_that_predict_responses(tiny_policy, packed, positions):
    """21 tokens; padded rows have the positions of all of them."""
    (first, last), seen = two_stages(tiny_policy, packed), []
    last.model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape))
    for training in (False, True):
        last.forward(0, first.forward(0, None, training), training)
        assert int(np.prod(seen.pop()[:-1])) == positions


@pytest.mark.parametrize("checkpointing, passes", [(False, 1), (True, 2)])
def test_checkpointed_layers_are_computed_again_in_the_backward_pass(tiny_policy, checkpointing, passes):
    (first, last), computed = two_stages(tiny_policy, checkpointing=checkpointing), []
    for stage in (first, last):
        for layer in stage.model.base_model.layers:
            if hasattr(layer, "mlp"):
                layer.mlp.register_forward_pre_hook(lambda *_: computed.append(1))
    last.forward(0, first.forward(0, None, True), True)
    assert len(computed) == 3
    first.backward(0, last.backward(0, None, whole=False), whole=False)
    assert len(computed) == 3 * passes
    for stage in (first, last):
        stage.weight_gradients(0)
        assert all(parameter.grad is not None for parameter in stage.model.parameters())
