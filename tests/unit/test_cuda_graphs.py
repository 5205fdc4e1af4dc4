"""Passes as CUDA graphs, emulated on CPUs, under real DeepSpeed engines: the numbers of passes that are launched."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_attention import LAID_OUT, SMALL, answers, pair, scores
from test_moves import DTYPES, group  # noqa: F401
from transformers import Qwen2Config
from worlds.emulated_graphs import EmulatedRecording, Graph

from rlfuse.cluster import watchdog
from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.graph_checks import BLOCKERS, graph_sizes, no_graphs_reason
from rlfuse.config.schema import Config, ModelConfig, OptimConfig
from rlfuse.engines.deepspeed.deepspeed_model import DeepSpeedModel
from rlfuse.engines.deepspeed.optimizer import take_step, trainable
from rlfuse.engines.trainer import cuda_graphs
from rlfuse.engines.trainer.cuda_graphs import CudaRecording, PassGraphs
from rlfuse.engines.trainer.families import value_class
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training, response_logits
from rlfuse.engines.trainer.trainer_rank import TrainerRank
from rlfuse.protocols import DeviceSharing
from rlfuse.samples import MicroBatch, Row

SIZES = (32, 64)
QWEN = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("family", LAID_OUT)
def test_padding_changes_no_number_of_a_token(family):
    model, _ = pair(family, SMALL | LAID_OUT[family])
    plain, padded = (collate(answers(), True, shared=True, sizes=sizes) for sizes in ((), SIZES))
    assert padded.inputs["input_ids"].shape == (1, 64) and plain.inputs["input_ids"].shape == (1, 42)
    found, expected = (scores(response_logits(model, batch)) for batch in (padded, plain))
    assert torch.allclose(found, expected, atol=2e-6)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(watchdog, "say", lines.append)
    monkeypatch.setattr(cuda_graphs, "CudaRecording", EmulatedRecording)
    return lines


def rank_of(stage, dtype, how, checkpointing=False, tied=True):
    """A rank with an actor and a critic; `how` passes run: recorded, padded to the same sizes, or as they are."""
    config, sizes = Config(), dict(QWEN, tie_word_embeddings=tied)
    config.actor.zero_stage, config.algorithm.adv_estimator = stage, "gae"
    rank = TrainerRank(config, 0, 1, "cpu")
    rank.engines = {}
    for name, kind in (("actor", None), ("critic", value_class(Qwen2Config(**sizes)))):
        torch.manual_seed(1)
        model = pair("Qwen2", sizes)[0] if kind is None else kind(Qwen2Config(**sizes))
        if kind:
            torch.nn.init.normal_(model.score.weight)
        model = prepare_for_training(model.to(DTYPES[dtype]), ModelConfig(enable_gradient_checkpointing=checkpointing))
        rank.engines[name] = DeepSpeedModel(trainable(model, config.actor, OptimConfig(lr=1e-2), "cpu"), 1)
    rank.tower, rank.sums, rank.ropes, rank.tensor = None, {}, {"actor": None, "critic": None}, None
    rank.packed, rank.shares, rank.parallel = True, True, SimpleNamespace(part=lambda degree: None)
    if how == "recorded":
        rank.graphs = PassGraphs({name: each.module for name, each in rank.engines.items()}, SIZES, rank.recorder)
    elif how == "padded":
        rank.graphs = SimpleNamespace(sizes=SIZES)
    return rank


def micro_batch(seed, *lengths):
    draw, rows = np.random.default_rng(seed), []
    prompt = draw.integers(3, 60, 5).astype(np.int32)
    for each in lengths:
        names = ("advantages", "old_log_probs", "values", "returns")
        tensors = {name: draw.normal(size=each).astype(np.float32) for name in names}
        rows.append(Row(prompt, draw.integers(3, 60, each).astype(np.int32), tensors))
    return MicroBatch(tuple(rows))


def play(rank):
    """Two steps of both models with scores between them; every number that comes of it, in order."""
    found = []
    for step in range(2):
        lengths = ((9, 12), (30, 20), (4,), (70,))  # of the last one, no size is large enough
        batches = [micro_batch(10 * step + seed, *each) for seed, each in enumerate(lengths)]
        scored = [each for model in ("actor", "critic") for each in rank.score((model,), batches)[model][0]]
        found += [torch.from_numpy(array) for arrays in scored for array in arrays]
        for name, engine in rank.engines.items():
            rank.accumulate((name,), batches[:2])
            rank.accumulate((name,), batches[2:])
            if rank.config.actor.zero_stage == 0:
                found += [each.grad.clone() for each in engine.module.parameters()]
            found.append(torch.tensor(take_step(engine.engine, 8.0, 1)))
            found += [each.detach().clone() for each in engine.module.parameters()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1])
def test_recorded_passes_give_the_numbers_of_launched_ones(said, stage, dtype):
    """Also where embedding and head are one tensor, and where layers would be run again."""
    settings = dict(checkpointing=stage == 1, tied=stage == 0)
    recorded, padded, plain = (rank_of(stage, dtype, how, **settings) for how in ("recorded", "padded", "as they are"))
    found, same, close = map(play, (recorded, padded, plain))
    assert not said and recorded.graphs.sizes == SIZES
    assert all(map(torch.equal, found, same))
    passes = [(span.cause, span.attributes["tokens"]) for span in recorded.recorder.drain() if span.kind == "record"]
    assert sorted(passes) == sorted([(name, size) for name in ("actor", "critic") for size in SIZES] * 2)
    if stage == 0:  # scores and the actor's gradients, before any update
        gradients = slice(12, 12 + len(list(plain.engines["actor"].module.parameters())))
        for part in [slice(i, i + 1) for i in range(12)] + [gradients]:
            one, other = (torch.cat([each.flatten() for each in numbers[part]]) for numbers in (found, close))
            assert (one - other).abs().max() <= {"float32": 1e-6, "bfloat16": 2e-2}[dtype] * other.abs().max()


def waiting(model, monkeypatch):
    layer = model.base_model.layers[0]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x, *rest, **named: forward(x * float(x.sum() != 0), *rest, **named))


def returning_more(model, monkeypatch):
    monkeypatch.setattr(model.config, "output_hidden_states", True)


def replaying_nothing(model, monkeypatch):
    monkeypatch.setattr(Graph, "replay", lambda graph: graph.calls[-1][3][-1].zero_())


def moving(model, monkeypatch):
    parameter = model.base_model.norm.weight
    parameter.data = parameter.data.clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, recorded_first, why",
    [
        (waiting, False, "a pass of the actor cannot be captured: operation not permitted"),
        (returning_more, False, "a pass of the actor cannot be captured: Qwen2Model returns more than hidden states"),
        (replaying_nothing, False, "a pass of the actor cannot be captured: a replay differs from a launched pass by"),
        (moving, True, "weights have moved"),
    ],
)
def test_what_cannot_be_recorded_is_launched_and_one_line_says_why(said, monkeypatch, change, recorded_first, why):
    ranks = [rank_of(0, "float32", how) for how in ("as they are", "recorded")]
    found = []
    for rank in ranks:
        model = rank.engines["actor"].module
        if recorded_first:
            rank.score(("actor",), [micro_batch(0, 9)])
        with monkeypatch.context() as patch:
            change(model, patch)
            scored, _ = rank.score(("actor",), [micro_batch(0, 9), micro_batch(1, 12)])["actor"]
        rank.accumulate(("actor",), [micro_batch(0, 9)])
        found.append([torch.from_numpy(array) for arrays in scored for array in arrays] + [model.lm_head.weight.grad])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True))
    assert ranks[1].graphs.sizes == () and len(said) == 1 and why in said[0]


@pytest.mark.slow
def test_a_pass_whose_memory_was_used_again_has_no_backward(said):
    rank = rank_of(0, "float32", "recorded")
    engine, batches = rank.engines["actor"], [rank._collate("actor", micro_batch(i, 9).rows, None) for i in range(2)]
    first, _ = (response_logits(engine, batch) for batch in batches)
    with pytest.raises(RuntimeError, match="before this one's backward"):
        engine.backward(first.sum())


@pytest.fixture
def torch_cuda(monkeypatch):
    """Return (calls of torch.cuda in order, streams entered); `torch.cuda.graph` is the original."""
    calls, streams = [], ["main"]

    def does(name):
        return lambda *given: calls.append((name, *given))

    class Graph:
        def capture_begin(self, pool, capture_error_mode, check_input_liveness):
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self):
            calls.append(("end",))

    @contextmanager
    def stream(entered):
        streams.append(entered)
        yield
        streams.pop()

    names = ("synchronize", "set_sync_debug_mode", "empty_cache")
    stubs = {name: does(name) for name in names} | {"graph_pool_handle": lambda: "pool", "stream": stream}
    stubs |= {"Stream": iter(("rehearsal", "capture")).__next__, "current_stream": lambda: streams[-1]}
    stubs |= {"CUDAGraph": Graph, "set_stream": lambda to: streams.__setitem__(slice(None), [to])}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return calls, streams


def test_torch_is_asked_to_rehearse_and_record_in_this_order(torch_cuda):
    calls, streams = torch_cuda
    recording = CudaRecording()
    with recording.warm_up():
        assert streams == ["main", "rehearsal"] and calls.pop() == ("set_sync_debug_mode", "error")
    assert calls == [("synchronize",), ("set_sync_debug_mode", "default"), ("synchronize",)] and streams == ["main"]
    with recording.capture():
        assert streams == ["main", "capture"] and calls[-1] == ("begin", "pool", "thread_local")
    assert calls[-1] == ("end",) and streams == ["main"]


def test_a_recording_that_fails_leaves_the_stream_that_was_current(torch_cuda, monkeypatch):
    def fails(graph):
        raise RuntimeError("operation failed due to a previous error during capture")

    _, streams = torch_cuda
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fails)
    with pytest.raises(RuntimeError, match="previous error"), CudaRecording().capture():
        raise RuntimeError("operation not permitted")
    assert streams == ["main"]


def test_models_that_leave_their_device_are_not_recorded(said, monkeypatch):
    rank = TrainerRank(Config(), 0, 1, "cpu")
    rank.graphs = PassGraphs({}, SIZES, rank.recorder)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rank.share(DeviceSharing(alternates=False))
    assert rank.graphs.sizes == SIZES
    rank.share(DeviceSharing(alternates=True))
    assert rank.graphs.sizes == () and "are offloaded for the engine" in said[0]


def job(**changed):
    config = Config()
    config.actor.ppo_max_token_len_per_gpu = 1024
    for name, value in changed.items():
        part, leaf = name.split("__")
        setattr(getattr(config, part), leaf, value)
    return config


BLOCKED = {
    "training.pipeline_parallel_size": 2, "training.tensor_model_parallel_size": 2,
    "training.ulysses_sequence_parallel_size": 2, "model.enable_activation_offload": True,
    "model.use_remove_padding": False, "actor.zero_stage": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKED)
def test_a_setting_that_rules_graphs_out_is_named(name):
    assert set(BLOCKED) == {*BLOCKERS, "actor.zero_stage"}
    changed = {name.replace(".", "__"): BLOCKED[name]}
    why = no_graphs_reason(job(**changed), 1.0)
    assert why.startswith(f"{name}={BLOCKED[name]}: ")
    [problem] = [x for x in check(job(**changed, actor__cuda_graphs="on"), Facts(cuda=True)) if "cuda_graphs" in x]
    assert why in problem
    assert not [x for x in check(job(**changed), Facts(cuda=True)) if "cuda_graphs" in x]


def test_small_models_with_small_micro_batches_are_recorded():
    assert no_graphs_reason(job(), 1e6) is None and graph_sizes(job()) == (256, 512, 1024)
    assert graph_sizes(job(actor__ppo_max_token_len_per_gpu=1200)) == (256, 512, 1024, 2048)
    assert graph_sizes(job(actor__ppo_max_token_len_per_gpu=16384))[-1] == 2048
    assert "launches only up to 2048 tokens" in no_graphs_reason(job(actor__ppo_max_token_len_per_gpu=16384), 1e6)
    assert "launches only up to 500 tokens" in no_graphs_reason(job(), 1e8)
    assert no_graphs_reason(job(actor__cuda_graphs="on"), 1e8) is None
    assert no_graphs_reason(job(actor__cuda_graphs="off"), 1e6) == "actor.cuda_graphs=off"
    assert no_graphs_reason(job(model__dtype="float32"), 1e7) and not no_graphs_reason(
        job(model__dtype="bfloat16"), 1e7
    )
    [problem] = [x for x in check(job(actor__cuda_graphs="on"), Facts(cuda=False)) if "cuda_graphs" in x]
    assert "needs GPUs" in problem
