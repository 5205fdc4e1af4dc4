"""Passes replayed as CUDA graphs, emulated on CPUs with real DeepSpeed engines, equal launched passes."""

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
def test_padding_does_not_change_logits(family):
    model, _ = pair(family, SMALL | LAID_OUT[family])
    plain, padded = (collate(answers(), True, shared=True, sizes=sizes) for sizes in ((), SIZES))
    assert padded.inputs["input_ids"].shape == (1, 64) and plain.inputs["input_ids"].shape == (1, 42)
    found, expected = (scores(response_logits(model, batch)) for batch in (padded, plain))
    assert torch.allclose(found, expected, atol=2e-6)


@pytest.fixture
def output(monkeypatch):
    lines = []
    monkeypatch.setattr(watchdog, "say", lines.append)
    monkeypatch.setattr(cuda_graphs, "CudaRecording", EmulatedRecording)
    return lines


def rank_of(stage, dtype, mode, checkpointing=False, tied=True):
    """Return a rank with an actor and a critic; `mode` of passes: recorded, padded to the same sizes, or neither."""
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
    if mode == "recorded":
        rank.graphs = PassGraphs({name: each.module for name, each in rank.engines.items()}, SIZES, rank.recorder)
    elif mode == "padded":
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


def run_two_steps(rank):
    """Run two steps of both models; return all scores, gradients, norms and weights in order."""
    found = []
    for step in range(2):
        lengths = ((9, 12), (30, 20), (4,), (70,))  # the last is larger than every size
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
def test_recorded_passes_equal_padded_launched_passes(output, stage, dtype):
    """Cover tied embeddings and gradient checkpointing."""
    settings = dict(checkpointing=stage == 1, tied=stage == 0)
    recorded, padded, plain = (
        rank_of(stage, dtype, mode, **settings) for mode in ("recorded", "padded", "as they are")
    )
    found, same, close = map(run_two_steps, (recorded, padded, plain))
    assert not output and recorded.graphs.sizes == SIZES
    assert all(map(torch.equal, found, same))
    passes = [(span.cause, span.attributes["tokens"]) for span in recorded.recorder.drain() if span.kind == "record"]
    assert sorted(passes) == sorted([(name, size) for name in ("actor", "critic") for size in SIZES] * 2)
    if stage == 0:  # scores and the actor's gradients of the first step
        gradients = slice(12, 12 + len(list(plain.engines["actor"].module.parameters())))
        for part in [slice(i, i + 1) for i in range(12)] + [gradients]:
            one, other = (torch.cat([each.flatten() for each in numbers[part]]) for numbers in (found, close))
            assert (one - other).abs().max() <= {"float32": 1e-6, "bfloat16": 2e-2}[dtype] * other.abs().max()


def synchronizing(model, monkeypatch):
    layer = model.base_model.layers[0]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x, *rest, **named: forward(x * float(x.sum() != 0), *rest, **named))


def returning_hidden_states(model, monkeypatch):
    monkeypatch.setattr(model.config, "output_hidden_states", True)


def replaying_zeros(model, monkeypatch):
    monkeypatch.setattr(Graph, "replay", lambda graph: graph.calls[-1][3][-1].zero_())


def moving_weights(model, monkeypatch):
    parameter = model.base_model.norm.weight
    parameter.data = parameter.data.clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, recorded_first, why",
    [
        (synchronizing, False, "a pass of the actor cannot be captured: operation not permitted"),
        (
            returning_hidden_states,
            False,
            "a pass of the actor cannot be captured: Qwen2Model returns more than hidden states",
        ),
        (replaying_zeros, False, "a pass of the actor cannot be captured: a replay differs from a launched pass by"),
        (moving_weights, True, "weights have moved"),
    ],
)
def test_passes_that_cannot_be_recorded_are_launched_and_reported_once(
    output, monkeypatch, change, recorded_first, why
):
    ranks = [rank_of(0, "float32", mode) for mode in ("as they are", "recorded")]
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
    assert ranks[1].graphs.sizes == () and len(output) == 1 and why in output[0]


@pytest.mark.slow
def test_backward_after_reuse_of_the_graph_memory_is_an_error(output):
    rank = rank_of(0, "float32", "recorded")
    engine, batches = rank.engines["actor"], [rank._collate("actor", micro_batch(i, 9).rows, None) for i in range(2)]
    first, _ = (response_logits(engine, batch) for batch in batches)
    with pytest.raises(RuntimeError, match="before this one's backward"):
        engine.backward(first.sum())


@pytest.fixture
def torch_cuda(monkeypatch):
    """Return (calls of torch.cuda in order, streams entered); `torch.cuda.graph` is the original."""
    calls, streams = [], ["main"]

    def recorded(name):
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
    stubs = {name: recorded(name) for name in names} | {"graph_pool_handle": lambda: "pool", "stream": stream}
    stubs |= {"Stream": iter(("rehearsal", "capture")).__next__, "current_stream": lambda: streams[-1]}
    stubs |= {"CUDAGraph": Graph, "set_stream": lambda to: streams.__setitem__(slice(None), [to])}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return calls, streams


def test_warmup_and_capture_calls_have_this_order(torch_cuda):
    calls, streams = torch_cuda
    recording = CudaRecording()
    with recording.warm_up():
        assert streams == ["main", "rehearsal"] and calls.pop() == ("set_sync_debug_mode", "error")
    assert calls == [("synchronize",), ("set_sync_debug_mode", "default"), ("synchronize",)] and streams == ["main"]
    with recording.capture():
        assert streams == ["main", "capture"] and calls[-1] == ("begin", "pool", "thread_local")
    assert calls[-1] == ("end",) and streams == ["main"]


def test_a_failed_recording_restores_the_current_stream(torch_cuda, monkeypatch):
    def fails(graph):
        raise RuntimeError("operation failed due to a previous error during capture")

    _, streams = torch_cuda
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fails)
    with pytest.raises(RuntimeError, match="previous error"), CudaRecording().capture():
        raise RuntimeError("operation not permitted")
    assert streams == ["main"]


def test_models_that_are_offloaded_are_not_recorded(output, monkeypatch):
    rank = TrainerRank(Config(), 0, 1, "cpu")
    rank.graphs = PassGraphs({}, SIZES, rank.recorder)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rank.share(DeviceSharing(alternates=False))
    assert rank.graphs.sizes == SIZES
    rank.share(DeviceSharing(alternates=True))
    assert rank.graphs.sizes == () and "are offloaded for the engine" in output[0]


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
def test_settings_that_exclude_graphs_are_reported(name):
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
