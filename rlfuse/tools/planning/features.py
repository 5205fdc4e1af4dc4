"""Describe the work of a recorded run in units that carry over to other models: FLOP, bytes, layers, calls.

`predicted_seconds` has the form that `costs` gives to a plan. The first step (warm-up) and validation do not count.
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
    """One piece of work of one device; amounts of all that it did, of which most are 0."""

    kind: str  # `generating scoring training`, `step` (everything else) or `copy_rate`
    source: str  # the run, or the part of a probe
    part: int  # step of the run, or place in the probe: what is held out together
    seconds: float
    calls: int = 0
    layers: int = 0  # of micro-batches, with their ENDS: in each forward pass; backward counts as two
    hidden: float = 0.0  # bytes of hidden states, of every layer, forward
    flops: float = 0.0  # of passes, prefills, updates
    steps: int = 0  # of decoding
    batch: int = 0  # sequences in each of them
    attended: float = 0.0  # sequences, in each layer of each of them
    read: float = 0.0  # bytes of weights that decoding reads
    computed: float = 0.0  # FLOP of decoding
    moved: float = 0.0  # bytes of caches read, of gradients and states in place, of pushed weights
    copied: float = 0.0  # bytes of gradients into new memory
    optimizer_steps: int = 0
    sent: float = 0.0  # bytes to other ranks of its node
    gathers: float = 0  # modules that ZeRO 3 looks after, in each pass
    busy_peers: int = 0  # other devices of its node that were at work at the same time


def predicted_seconds(work: Work, hardware: Hardware) -> float:
    """What a device takes for it."""
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
    """Of a pass over samples of these lengths; only tokens that predict a response pass the head."""
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    attention = 2 * len(shape.layers) * shape.heads * shape.head_width * sum(length**2 for length in whole)
    return 2 * (shape.passed * sum(whole) + shape.head * sum(responses)) + attention


def work_of_run(source: str, config: Config, shapes: Mapping[str, Shape], spans: Sequence[Span]) -> list[Work]:
    """All work of a run's steps but the first; nothing where it has no second one."""
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
    within = config.trainer.nnodes == 1  # what goes between nodes tells nothing of the links within one
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
            begun = layers + passes * END_LAYERS
            for span in done:
                hidden = layers * shape.hidden * ITEM[config.model.dtype] * span.tokens
                flops = passes * _flops(config, shape, span, lengths)
                work = Work(kind, *part, span.seconds, 0, begun, hidden, flops, gathers=each.modules)
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
    """Yield the spans, each backward starting where its forward did: micro-batches run one after the other."""
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
    whole = sum(map(sum, known))
    if not known:
        count, limits = max(1, len(span.samples)), config.data
        kept = limits.max_response_length / (limits.max_prompt_length + limits.max_response_length)
        each, whole = span.tokens / count, span.tokens
        known = [((1 - kept) * each, kept * each)] * count
    prompts, responses = zip(*known, strict=True)
    return forward_flops(shape, prompts, responses) * span.tokens / max(whole, 1)
