"""Pipelines in one process: layouts, partitions, splitting of rows, and the split backward pass."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from test_models import Clip
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.schema import Config, DataConfig
from rlfuse.engines.pipeline import split_backward
from rlfuse.engines.pipeline.layout import Pipelines, mesh_of
from rlfuse.engines.pipeline.loading import load_stage
from rlfuse.engines.pipeline.partition import (
    balanced,
    logits_fraction,
    measured_costs,
    modelled_costs,
    parts,
    stage_costs,
)
from rlfuse.engines.pipeline.pipeline_group import forward_only
from rlfuse.engines.pipeline.stages import Stage, check_first_layer, check_head
from rlfuse.engines.trainer.attention import attend_by_layout
from rlfuse.engines.trainer.micro_batch_losses import actor_loss
from rlfuse.engines.trainer.micro_batches import split_evenly
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.errors import EngineError
from rlfuse.fusion.schedules.operations import Operation
from rlfuse.fusion.schedules.problem import Model, Problem
from rlfuse.fusion.schedules.search import search
from rlfuse.samples import MicroBatch, Row, Visual
from rlfuse.tasks.small_video_models import write_small_qwen25_vl


def test_placement_of_stages_in_both_directions():
    up = Pipelines("critic", 2, 2, "up")
    assert [Pipelines("actor", 4).device(0, stage) for stage in range(4)] == [0, 1, 2, 3]
    assert [[up.device(pipeline, stage) for stage in range(2)] for pipeline in range(2)] == [[1, 0], [3, 2]]
    assert [up.pipeline(device) for device in range(4)] == [0, 0, 1, 1]
    assert [up.stages_on(device) for device in range(4)] == [(1,), (0,), (1,), (0,)]


def test_two_chunks_have_v_placement():
    v, up = Pipelines("actor", 3, chunks=2), Pipelines("actor", 3, direction="up", chunks=2)
    assert [v.device(0, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert v.stages_on(0) == (0, 5)
    assert [up.device(0, stage) for stage in range(6)] == [2, 1, 0, 0, 1, 2]


def test_placement_of_interleaved_chunks():
    down = Pipelines("actor", 3, chunks=2, placement="interleaved")
    assert [down.device(0, stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert down.stages_on(1) == (1, 4)
    up = Pipelines("actor", 2, 2, "up", 3, "interleaved")
    assert [[up.device(pipeline, stage) for stage in range(6)] for pipeline in (0, 1)] == [[1, 0] * 3, [3, 2] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["v", "interleaved"])
@given(st.integers(1, 10), st.integers(0, 9), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_layers_are_split_so_that_devices_are_balanced(placement, layers, head, stages, rates):
    """Compare with all splits in which only the last stage may have no layer."""
    pipelines = Pipelines("actor", stages, chunks=2, placement=placement)
    depth, rate = pipelines.depth, [rates[pipelines.device(0, stage)] for stage in range(pipelines.depth)]
    costs = [2.0] * layers, 1.0, float(head)
    if layers < depth - 1:
        with pytest.raises(ValueError, match=f"{layers} layers can't be split into {depth} stages"):
            pipelines.balanced(costs, rate)
        return

    def slowest(sizes):
        took = [0.0] * stages
        for stage, cost in enumerate(stage_costs(sizes, *costs)):
            took[pipelines.device(0, stage)] += rate[stage] * cost
        return max(took)

    cuts = [
        (*(b - a for a, b in pairwise((0, *ends))), layers - (ends[-1] if ends else 0))
        for ends in combinations(range(1, layers + 1), depth - 1)
    ]
    sizes = pipelines.balanced(costs, rate)
    assert sum(sizes) == layers and all(sizes[:-1]) and slowest(sizes) == min(map(slowest, cuts))


def test_chunks_stay_within_the_memory_of_their_stages():
    v, costs = Pipelines("actor", 2, chunks=2), ([1.0] * 8, 0.0, 4.0)
    assert v.balanced(costs) == (2, 3, 3, 0) and v.balanced(costs, most=(3, 2, 3, 3)) == (3, 2, 3, 0)
    with pytest.raises(ValueError, match=r"8 layers don't fit: the stages have memory for \(2, 2, 2, 1\)"):
        v.balanced(costs, most=(2, 2, 2, 1))


def test_results_are_sent_forward_in_f_backward_in_b_and_not_in_w():
    model = Pipelines("actor", 3)
    at = lambda stage, kind: Operation("actor", 0, stage, 0, kind)  # noqa: E731
    assert [(model.source(at(s, "F")), model.target(at(s, "F"))) for s in range(3)] == [(None, 1), (0, 2), (1, None)]
    assert [(model.source(at(s, "B")), model.target(at(s, "B"))) for s in range(3)] == [(1, None), (2, 0), (None, 1)]
    assert model.source(at(1, "W")) is model.target(at(1, "W")) is None


def test_devices_share_a_vocabulary_parallel_head_in_any_placement():
    """Check that the first stages hold the shares, and that the split of layers ignores the head."""
    costs = [1.0] * 8, 0.0, 4.0
    alone, v = Pipelines("actor", 2, vocabulary=True), Pipelines("actor", 2, chunks=2, vocabulary=True)
    assert alone.balanced(costs) == (4, 4) and v.balanced(costs) == (2, 2, 2, 2)
    assert [part.head for part in parts((4, 4), alone.head_degree)] == [(0, 2), (1, 2)]
    assert [part.head for part in parts((2, 2, 2, 2), v.head_degree)] == [(0, 2), (1, 2), None, None]
    assert [part.head for part in parts((4, 4))] == [None, (0, 1)]
    assert stage_costs((4, 4), *costs, alone.head_degree) == [6.0, 6.0] and stage_costs((4, 4), *costs) == [4.0, 8.0]
    assert all(v.source(Operation("actor", 0, stage, 0, "H")) is None for stage in (0, 1))


@pytest.mark.slow
def test_placeholder_tokens_are_masked_in_the_head_share_that_has_them(tiny_policy, tmp_path):
    """Mask token 22 of 40, which is in the second half."""
    model = Qwen2ForCausalLM.from_pretrained(tiny_policy)
    model.config.image_token_id = 22
    model.save_pretrained(tmp_path)
    models = [load_stage(str(tmp_path), Config().model, "cpu", part, False) for part in parts((1, 2), 2)]
    given = torch.ones(1, model.config.hidden_size, dtype=models[0].dtype)
    left_out = [each.lm_head(given)[0].isneginf().nonzero().flatten().tolist() for each in models]
    assert left_out == [[], [22 - model.config.vocab_size // 2]]


@pytest.mark.slow
def test_shares_of_a_head_are_loaded_and_complete(tiny_policy):
    whole = Qwen2ForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    settings = replace(Config().model, dtype="float32")
    models = [load_stage(tiny_policy, settings, "cpu", part, False) for part in parts((1, 1, 1), 2)]
    assert torch.equal(torch.cat([each.lm_head.weight for each in models[:2]]), whole.lm_head.weight)
    assert [each.lm_head.first_id for each in models[:2]] == [0, len(whole.lm_head.weight) // 2]
    assert models[0].lm_head.weight is not models[0].get_input_embeddings().weight
    assert not list(models[2].lm_head.parameters()) and list(models[2].base_model.norm.parameters())
    for model in models[:2]:
        check_head(model, packed=True)
    odd = next(width for width in range(3, 9) if len(whole.lm_head.weight) % width)
    with pytest.raises(ValueError, match=f"vocabulary_parallel=true: the head of .* divisible by {odd} stages"):
        load_stage(tiny_policy, settings, "cpu", parts((1,) * odd, odd)[0], False)


SMALL = dict(
    vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize(
    "family, more, plain",
    [
        ("Granite", {"logits_scaling": 4.0}, {"logits_scaling": 1.0}),
        ("Cohere", {}, {"logit_scale": 1.0}),
        ("Gemma2", {}, {"final_logit_softcapping": None}),
    ],
)
def test_families_with_operations_besides_the_head_are_refused(family, more, plain):
    """Include a soft cap of 30, although the logits of this small model are far below it."""
    torch.manual_seed(0)
    config, kind = (getattr(transformers, family + suffix) for suffix in ("Config", "ForCausalLM"))
    with pytest.raises(EngineError, match=f"a {family}ForCausalLM has operations besides its head"):
        check_head(attend_by_layout(kind(config(**SMALL, **more))), packed=True)
    check_head(attend_by_layout(kind(config(**SMALL, **plain))), packed=True)


def test_families_that_scale_embeddings_outside_the_embedding_layer_are_refused():
    """Compare Granite, which scales in the model, with Gemma 2, which scales in its embedding layer."""
    for name, more in {"Granite": {"embedding_multiplier": 2.0}, "Gemma2": {}}.items():
        config, kind = (getattr(transformers, name + suffix) for suffix in ("Config", "ForCausalLM"))
        model = attend_by_layout(kind(config(**SMALL, **more)))
        if name == "Granite":
            with pytest.raises(EngineError, match="a GraniteForCausalLM changes embeddings before"):
                check_first_layer(model, packed=True)
            model.base_model.embedding_multiplier = 1.0
        check_first_layer(model, packed=True)


def test_invalid_layouts_are_refused():
    assert mesh_of([Pipelines("actor", 4), Pipelines("critic", 2, 2)], 8) == ParallelMesh(dp=2, pp=4)
    assert mesh_of([Pipelines("actor", 2, width=3)], 12) == ParallelMesh(dp=2, pp=2, tp=3)
    with pytest.raises(ValueError, match=r"same number of ranks per device, but got"):
        mesh_of([Pipelines("actor", 2, width=2), Pipelines("critic", 2)], 4)
    with pytest.raises(ValueError, match="must use the same number"):
        mesh_of([Pipelines("actor", 4), Pipelines("critic", 2)], 4)
    with pytest.raises(ValueError, match="6 ranks are not a multiple of a block of 4"):
        mesh_of([Pipelines("actor", 4)], 6)
    with pytest.raises(ValueError, match="chunks=0: must be at least 1"):
        Pipelines("actor", 2, chunks=0)
    with pytest.raises(ValueError, match="has 2 stages instead of 4"):
        Pipelines("actor", 2, chunks=2, layers=(3, 1))


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 9), st.integers(0, 30), st.integers(1, 4))
def test_balanced_stages_are_optimal(layers, embedding, head, stages):
    if len(layers) < stages - 1:
        with pytest.raises(ValueError, match=f"{len(layers)} layers can't be split into {stages} stages"):
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


def test_large_vocabulary_moves_layers_off_the_last_stage():
    class Config:
        hidden_size, intermediate_size, num_hidden_layers = 896, 4864, 24  # Qwen2.5 0.5B
        num_attention_heads, num_key_value_heads, vocab_size = 14, 2, 151_936

    cuts = {share: balanced(*modelled_costs(Config, Config.vocab_size, share), 4) for share in (1.0, 0.5, 0.1)}
    assert cuts == {1.0: (8, 8, 8, 0), 0.5: (7, 7, 7, 3), 0.1: (6, 6, 6, 6)}
    cuts = [balanced(*modelled_costs(Config, *given), 4) for given in ((1, 1.0), (Config.vocab_size, 0.1, 4))]
    assert cuts == [(6, 6, 6, 6), (7, 7, 7, 3)]
    assert [(part.layers, part.first, part.last) for part in parts((2, 0))] == [
        (range(2), True, False),
        (range(2, 2), False, True),
    ]


def test_costs_are_derived_from_measured_stage_times():
    model = [3.0] * 6, 0.0, 18.0
    layers, _, head = measured_costs((4, 2), (8.0, 10.0), model)
    assert sum(layers) + head == pytest.approx(36) and head == pytest.approx(12) and layers == pytest.approx([4.0] * 6)
    assert measured_costs((3, 3), (9.0, 8.0), model)[2] == 0.0  # the head costs nothing, up to noise


def test_logits_fraction_is_the_share_of_response_tokens():
    assert logits_fraction(DataConfig(max_prompt_length=512, max_response_length=1536)) == 0.75


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 5))
def test_every_row_is_assigned_to_one_pipeline_and_micro_batch(lengths, pipelines, count):
    plan = split_evenly(lengths, pipelines, count)
    assert [len(bins) for bins in plan] == [count] * pipelines
    assert sorted(i for bins in plan for bin in bins for i in bin) == list(range(len(lengths)))


def test_forward_only_schedules_pass_every_stage():
    rows = forward_only(Pipelines("ref", 2, 2, "up"), 3)
    assert [{(op.pipeline, op.stage) for op in row} for row in rows] == [{(0, 1)}, {(0, 0)}, {(1, 1)}, {(1, 0)}]
    assert all([op.micro_batch for op in row] == [0, 1, 2] and {op.kind for op in row} == {"F"} for row in rows)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_split_backward_matches_autograd(checkpointing):
    """Compute input gradients immediately and those of linear layers later, for two passes that accumulate."""

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


def stages_of(path, layers, packed=True, checkpointing=False, visual=()):
    """Return actor stages with these layer counts and a micro-batch of two rows, the first with `visual`."""
    config, ids = Config(), np.arange(3, 20, dtype=np.int32)
    config.model.dtype, config.model.enable_gradient_checkpointing = "float32", checkpointing
    rows = [
        Row(ids[:prompt], ids[:response], dict.fromkeys(("old_log_probs", "advantages"), np.ones(response, np.float32)))
        for prompt, response in ((9, 3), (4, 5))
    ]
    rows[0] = replace(rows[0], visual=visual)
    models = [load_stage(path, config.model, "cpu", part, False).train() for part in parts(layers)]
    stages = [Stage(config, "actor", m, part, packed, "cpu") for m, part in zip(models, parts(layers), strict=True)]
    for stage in stages:
        stage.begin([MicroBatch(rows, 1.0)])
    return stages


def two_stages(path, packed=True, checkpointing=False, visual=()):
    """Return a stage with layers 0 and 1, and a stage with layer 2."""
    return stages_of(path, (2, 1), packed, checkpointing, visual)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["v", "interleaved"])
@pytest.mark.parametrize("split", [False, True])
def test_chunks_in_a_searched_schedule_give_the_gradients_of_the_whole_model(tiny_policy, placement, split):
    """Use two devices with two chunks each, the last of which is only the head, and four equal micro-batches."""
    stages = stages_of(tiny_policy, Pipelines("actor", 2, chunks=2, placement=placement).balanced(([1.0] * 3, 0, 2.0)))
    (batch,) = stages[0].micro_batches
    for stage in stages:
        stage.begin([batch] * 4)
    given = Problem(2, (Model("actor", 2, 4, 1.0, 2.0),), split, chunks_per_device=2, placement=placement)
    rows = search(given, method="list", time_limit=0.2).rows
    results = {}
    for timed in sorted((each for row in rows for each in row), key=lambda each: (each.start, each.operation.kind)):
        _, _, at, number, kind = timed.operation
        if kind == "F":
            results[at, number, kind] = stages[at].forward(number, results.get((at - 1, number, kind)), True)
        elif kind == "B":
            results[at, number, kind] = stages[at].backward(number, results.get((at + 1, number, kind)), not split)
        else:
            stages[at].weight_gradients(number)
    whole = Qwen2ForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    (4 * actor_loss(stages[0].config, attend_by_layout(whole), collate(batch.rows, packed=True))[0]).backward()
    found = [(name, parameter.grad) for stage in stages for name, parameter in stage.model.named_parameters()]
    assert {name for name, _ in found} == {name for name, _ in whole.named_parameters()}
    for name, gradient in found:
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad)


@pytest.mark.parametrize("packed", [True, False])
def test_clips_are_embedded_on_the_first_stage_as_in_the_whole_model(tiny_policy, packed):
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


def test_models_without_a_plain_stack_of_layers_are_refused(tmp_path):
    folder = write_small_qwen25_vl(tmp_path)
    with pytest.raises(ValueError, match=r"Qwen2_5_VLForCausalLM has no embed_tokens.* without pipeline parallelism"):
        load_stage(str(folder), Config().model, "cpu", parts((1, 1))[0], False)


@pytest.mark.parametrize("packed, positions", [(True, 3 + 5), (False, 2 * 8)])
def test_head_is_only_computed_at_positions_that_predict_responses(tiny_policy, packed, positions):
    """Run 21 tokens; in padded rows, the head also runs at padding."""
    (first, last), seen = two_stages(tiny_policy, packed), []
    last.model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape))
    for training in (False, True):
        last.forward(0, first.forward(0, None, training), training)
        assert int(np.prod(seen.pop()[:-1])) == positions


@pytest.mark.parametrize("checkpointing, passes", [(False, 1), (True, 2)])
def test_checkpointed_layers_are_recomputed_once_in_the_backward_pass(tiny_policy, checkpointing, passes):
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
