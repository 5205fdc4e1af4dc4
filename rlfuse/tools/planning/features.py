"""Describe the work of a recorded run in units that carry over to other models: FLOP, bytes, layers, calls.

`predicted_seconds` uses the same cost model as `costs`. The first step (warm-up) and validation are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from rlfuse.config.schema import Config
from rlfuse.costs.spans import busiest_ranks, is_optimizer_step, lengths_of, spans_within, unexplained_seconds, updates
from rlfuse.engines.memory.estimate import ITEM, quantization_savings
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.events import Span
from rlfuse.samples import PASSES
from rlfuse.step.scoring import model_of
from rlfuse.tools.planning.exchanges import (
    Traffic,
    gradient_exchange,
    gradient_traffic,
    parameters_per_rank,
    pass_exchange,
    step_exchange,
    step_traffic,
)
from rlfuse.tools.planning.hardware import END_LAYERS, Hardware

ROLES = {"actor": "actor", "critic": "critic", "ref": "reference"}  # a model's name in spans -> in shapes


@dataclass(frozen=True, slots=True)
class Work:
    """One measured piece of work of one device, with its amounts; most of them are 0."""

    kind: str  # `generating scoring training`, `step` (everything else) or `copy_rate`
    source: str  # name of the run or probe
    part: int  # step of the run or index in the probe; held out as a unit
    seconds: float
    calls: int = 0
    layers: int = 0  # layers run by micro-batches, plus END_LAYERS; a backward pass counts twice
    hidden: float = 0.0  # bytes of hidden states of all layers, forward
    flops: float = 0.0  # FLOP of passes, prefills and updates
    steps: int = 0  # decoding steps
    batch: int = 0  # sequences per decoding step
    attended: float = 0.0  # sequences x layers x decoding steps
    read: float = 0.0  # bytes of weights read by decoding
    computed: float = 0.0  # FLOP of decoding
    moved: float = 0.0  # bytes of KV cache reads, in-place gradients and states, weight updates
    copied: float = 0.0  # bytes copied into new memory
    optimizer_steps: int = 0
    sent: float = 0.0  # bytes sent to other ranks of the node
    gathers: float = 0  # modules gathered by ZeRO 3, per pass
    busy_peers: int = 0  # other busy devices of the node


def predicted_seconds(work: Work, hardware: Hardware) -> float:
    """Return the seconds that this hardware takes for the work."""
    hardware = hardware.with_busy_peers(work.busy_peers)
    if work.kind == "step":
        return hardware.step_s + work.moved / hardware.bytes_per_s
    if work.kind == "generating":
        own = work.steps * (hardware.decode_step_s + work.batch * hardware.decode_sequence_s)
        own += work.attended * hardware.decode_attention_s
        read = hardware.decoding_s(work.read / hardware.bytes_per_s, work.computed / hardware.decode_flops)
        return own + read + work.moved / hardware.bytes_per_s + work.flops / hardware.pass_flops
    scoring = work.kind == "scoring"
    call_s = hardware.pass_call_s if scoring else hardware.train_call_s
    rate = hardware.pass_flops if scoring else hardware.train_flops
    started = work.calls * call_s + work.layers * hardware.layer_s
    states = work.moved / hardware.update_rate + work.copied / hardware.copy_rate
    computed = work.hidden / hardware.hidden_bytes_per_s + work.flops / rate
    exchanged = work.gathers * hardware.gather_s + work.sent / (hardware.sent_bytes_per_s or inf)
    return started + computed + states + work.optimizer_steps * hardware.optimizer_s + exchanged


def forward_flops(shape: Shape, prompts: Sequence[float], responses: Sequence[float]) -> float:
    """Return the FLOP of a forward pass over samples of these lengths; only response positions use the LM head."""
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    attention = 2 * len(shape.layers) * shape.heads * shape.head_width * sum(length**2 for length in lengths)
    return 2 * (shape.passed * sum(lengths) + shape.head * sum(responses)) + attention


def work_of_run(source: str, config: Config, shapes: Mapping[str, Shape], spans: Sequence[Span]) -> list[Work]:
    """Return the work of all steps of a run except the first."""
    lengths = lengths_of(spans)
    steps = [span for span in spans if span.kind == "step" and spans_within(spans, span)][1:]
    found = []
    for number, step in enumerate(steps):
        inside, part = spans_within(spans, step), (source, number)
        found += [_decoding(part, span, config, shapes["actor"]) for span in inside if span.kind == "decode"]
        found += _calls(part, config, shapes, inside, lengths)
        pushed = 2 * shapes["actor"].parameters * ITEM[config.model.dtype]
        found += [Work("step", *part, rest, moved=pushed) for rest in unexplained_seconds(inside)]
    busy_peers = config.trainer.n_gpus_per_node - 1
    return [replace(work, busy_peers=busy_peers) for work in found if work.seconds > 0]


def _decoding(part: tuple[str, int], span: Span, config: Config, shape: Shape) -> Work:
    seen, width, item = span.attributes, config.rollout.tensor_model_parallel_size, ITEM[config.model.dtype]
    steps, batch = seen["steps"], seen["batch"]
    return Work(
        "generating",
        *part,
        span.seconds,
        flops=2 * shape.passed * seen["prefill_tokens"] / width,
        steps=steps,
        batch=batch,
        attended=steps * batch * len(shape.layers) / width,
        read=steps * ((sum(shape.layers) + shape.head) * item - quantization_savings(config, shape)) / width,
        computed=2 * steps * batch * (shape.passed + shape.head) / width,
        moved=steps * seen["context"] * shape.cache.bytes_of(1, item) / width,
    )


def _calls(
    part: tuple[str, int],
    config: Config,
    shapes: Mapping[str, Shape],
    spans: Sequence[Span],
    lengths: Mapping[str, tuple[int, int]],
) -> Iterator[Work]:
    within = config.trainer.nnodes == 1  # traffic between nodes does not measure links within a node
    copies = config.mesh.copies
    share = (copies - 1) / copies if within else 0.0
    learn = 4 if config.model.enable_gradient_checkpointing else 3
    gradients = [span for span in _with_forwards(spans) if not is_optimizer_step(span)]
    for kind, passes, model, found in (
        ("scoring", 1, model_of, busiest_ranks(spans, PASSES, PASSES)),
        ("training", learn, _learning, busiest_ranks(gradients, updates(spans), ("backward",))),
    ):
        for call, done in found:
            shape = shapes[ROLES[model(call.kind)]]
            each, own = pass_exchange(config, shape), Traffic()
            if kind == "training":
                each = gradient_exchange(config, shape)
                own = gradient_traffic(config, parameters_per_rank(config, shape), copies)
            own += each.copies if copies > 1 else Traffic()
            layers = passes * len(shape.layers)
            launched = layers + passes * END_LAYERS
            for span in done:
                hidden = layers * shape.hidden * ITEM[config.model.dtype] * span.tokens
                flops = passes * _flops(config, shape, span, lengths)
                work = Work(kind, *part, span.seconds, 0, launched, hidden, flops, gathers=each.modules)
                yield replace(work, sent=share * each.bytes, moved=own.in_place, copied=own.copied)
            yield Work(kind, *part, call.seconds - sum(span.seconds for span in done), calls=1)
    for span in filter(is_optimizer_step, spans):
        shape = shapes[ROLES[_learning(span.kind)]]
        own, sent = (
            step_traffic(config, parameters_per_rank(config, shape), copies),
            share * step_exchange(config, shape).bytes,
        )
        work = Work("training", *part, span.seconds, optimizer_steps=1, sent=sent)
        yield replace(work, moved=own.in_place, copied=own.copied)


def _with_forwards(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans, with each backward extended to start with its forward; micro-batches run one at a time."""
    begun: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind == "forward":
            begun[span.where] = span.start
        learns = span.kind == "backward" and span.where in begun
        yield replace(span, start=begun.pop(span.where)) if learns else span


def _learning(kind: str) -> str:
    return kind.removeprefix("update_")


def _flops(config: Config, shape: Shape, span: Span, lengths: Mapping[str, tuple[int, int]]) -> float:
    known = [lengths[name] for name in span.samples if name in lengths]
    total = sum(map(sum, known))
    if not known:
        count, limits = max(1, len(span.samples)), config.data
        kept = limits.max_response_length / (limits.max_prompt_length + limits.max_response_length)
        each, total = span.tokens / count, span.tokens
        known = [((1 - kept) * each, kept * each)] * count
    prompts, responses = zip(*known, strict=True)
    return forward_flops(shape, prompts, responses) * span.tokens / max(total, 1)
