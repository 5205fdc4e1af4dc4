"""Predict the seconds of each kind of work from a model's shape and the hardware.

An engine spans `rollout.tensor_model_parallel_size` devices; a trainer rank is one device. Tensor parallelism
all-reduces twice per layer (Megatron, arXiv 1909.08053). Collectives are assumed not to overlap with compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from rlfuse.config.schema import Config
from rlfuse.costs.model import Costs
from rlfuse.engines.memory.activations import largest_activation_plan
from rlfuse.engines.memory.estimate import ITEM, Moved, quantization_savings
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.pipeline.partition import logits_fraction
from rlfuse.simulate.job_step import micro_batches, responses_per_prompt
from rlfuse.tools.planning.exchanges import (
    Exchange,
    Traffic,
    gradient_exchange,
    gradient_traffic,
    offloaded_gradient_bytes,
    offloaded_step_bytes,
    optimizer_bytes,
    parameters_per_rank,
    pass_exchange,
    step_exchange,
    step_traffic,
)
from rlfuse.tools.planning.hardware import END_LAYERS, Hardware, NodeSpeed, WorkSpeed

NOTHING_MOVED = Moved()


def costs_of(
    config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float, moved: Moved = NOTHING_MOVED
) -> Costs:
    """Return the costs of a job on this hardware. `context`: mean tokens of a sample, including its prompt."""
    width = config.rollout.tensor_model_parallel_size
    hardware = hardware.with_node_size(config.trainer.n_gpus_per_node)
    ranks = _Ranks(config, shapes, hardware, context)
    host_rate = hardware.host_bytes_per_s
    return Costs(
        **_decoding(config, shapes["actor"], hardware),
        max_sequences=config.rollout.max_num_seqs,
        max_tokens=config.data.max_response_length,
        score_tokens_per_s=width / ranks.score_token_s(),
        score_call_s=hardware.pass_call_s,
        train_tokens_per_s=width / ranks.train_token_s(),
        train_call_s=hardware.train_call_s,
        optimizer_s=ranks.optimizer_s() + ranks.optimizer_transfer_s(moved.optimizers),
        switch_s=ranks.switch_s(moved),
        link_bytes_per_s=0.0
        if host_rate == float("inf")
        else host_rate / 2,  # KV caches are copied through host memory
        step_s=ranks.push_s() + hardware.step_s,
    )


def _decoding(config: Config, shape: Shape, hardware: Hardware) -> dict[str, float]:
    """Return the decoding fields of `Costs`.

    A step takes `start + own * batch + max(read, computed * batch)`, or the sum of the last two if compute does not
    overlap reads. `Costs` are piecewise linear with one bend: they are exact for one sequence and in the compute-bound
    range, and underestimate in between by less than `own` per sequence.
    """
    width, item, links = config.rollout.tensor_model_parallel_size, ITEM[config.model.dtype], hardware.links
    flops, speed, cached = hardware.decode_flops * width, hardware.bytes_per_s * width, shape.cache.bytes_of(1, item)
    token = 2 * (shape.passed + shape.head)  # every decoded token uses the LM head
    reduced = 2 * len(shape.layers) * shape.hidden * item
    sent = links.all_reduce(reduced, width) - links.all_reduce(0, width)
    read = ((sum(shape.layers) + shape.head) * item - quantization_savings(config, shape)) / speed
    start = hardware.decode_step_s + 2 * len(shape.layers) * links.all_reduce(0, width)
    own = hardware.decode_sequence_s + hardware.decode_attention_s * len(shape.layers) / width
    each = token / flops + own
    flat = max(1, int((read + own) / each)) if hardware.decode_overlaps else 1
    return {
        "step_base_s": start + own + hardware.decoding_s(read, token / flops),
        "step_per_sequence_s": each + sent,
        "step_per_context_token_s": cached / speed,
        "flat_batch": flat,
        "prefill_tokens_per_s": 1 / (2 * shape.passed / (hardware.pass_flops * width) + sent),
        "kv_bytes_per_token": cached,
    }


def work_speeds(
    config: Config, shape: Shape, hardware: Hardware, nodes: Sequence[NodeSpeed], context: float
) -> tuple[WorkSpeed, ...]:
    """Return the relative speed of each node; decoding at the mean batch of an engine. `context`: as `costs_of`."""
    hardware = hardware.with_node_size(config.trainer.n_gpus_per_node)
    engines = config.slots / config.rollout.tensor_model_parallel_size
    samples = config.data.train_batch_size * responses_per_prompt(config) / engines
    batch = max(1, round(min(samples, config.rollout.max_num_seqs) / 2))

    def step_s(node: NodeSpeed) -> float:
        flops, bandwidth = hardware.decode_flops * node.compute, hardware.bytes_per_s * node.memory
        there = replace(hardware, decode_flops=flops, bytes_per_s=bandwidth)
        return Costs(**_decoding(config, shape, there)).decode_step(batch, batch * context)

    return tuple(WorkSpeed(node.compute, step_s(NodeSpeed()) / step_s(node)) for node in nodes)


def optimizer_transfer_seconds(
    config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float, moved: Moved
) -> tuple[float, float]:
    """Return (seconds, overlapped seconds) per step of moving optimizer state to the device, and back if it moves
    for each update. Arguments: as `costs_of`."""
    hardware = hardware.with_node_size(config.trainer.n_gpus_per_node)
    ranks, residency = _Ranks(config, shapes, hardware, context), config.actor.optimizer_residency
    if residency == "step":
        updates = config.actor.ppo_epochs * -(-config.data.train_batch_size // config.actor.ppo_mini_batch_size)
        return updates * 2 * moved.optimizers / hardware.host_bytes_per_s, 0.0
    hidden = ranks.overlapped_transfer_s(moved.optimizers) if residency == "forecast" else 0.0
    return moved.optimizers / hardware.host_bytes_per_s, hidden


def offload_traffic(
    config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float
) -> tuple[float, float]:
    """Return (bytes, seconds) per step between a device and optimizers kept on the host. Arguments: as `costs_of`."""
    hardware = hardware.with_node_size(config.trainer.n_gpus_per_node)
    return _Ranks(config, shapes, hardware, context).offload_traffic()


class _Ranks:
    """Costs of a trainer rank. Seconds per token include all pipeline stages: a rank runs one stage of proportionally
    more tokens."""

    def __init__(self, config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float):
        self._config, self._hardware, self._context = config, hardware, context
        self._item = ITEM[config.model.dtype]
        self._stages, self._width = config.training.pipeline_parallel_size, config.training.tensor_model_parallel_size
        self._copies = config.mesh.copies
        self._trained_shapes = {role: each for role, each in shapes.items() if role != "reference"}
        self._policy, self._trained = shapes["actor"], list(self._trained_shapes.values())
        prompts = config.actor.ppo_mini_batch_size
        self._rank_tokens = prompts * config.rollout.n * context / self._copies
        self._micro_batch = max(1.0, self._rank_tokens / micro_batches(config, prompts, context))

    @property
    def _spans_nodes(self) -> bool:
        return self._stages * self._width > self._hardware.links.per_node

    def score_token_s(self) -> float:
        shape, flops = self._policy, max(_flops(self._config, each, self._context) for each in self._trained)
        gathered = self._stages * self._collectives_s(pass_exchange(self._config, shape))
        computed = flops / self._hardware.pass_flops + self._hidden_states_s(shape) + self._all_reduce_s(shape)
        once = (gathered + self._launch_s(shape)) / self._micro_batch
        return self._width * (computed + once + self._all_to_all_s(shape))

    def train_token_s(self) -> float:
        return max(
            self._train_token_s(shape, 3 + self._recomputed_share(role)) for role, shape in self._trained_shapes.items()
        )

    def _recomputed_share(self, role: str) -> float:
        model, shape, hardware = self._config.model, self._trained_shapes[role], self._hardware
        if model.enable_gradient_checkpointing or not model.enable_activation_offload:
            return float(model.enable_gradient_checkpointing)
        flops = _flops(self._config, shape, self._context) / len(shape.layers)
        seconds = self._micro_batch * flops / hardware.train_flops
        device = "cpu" if hardware.host_bytes_per_s == inf else "cuda"
        return largest_activation_plan(
            self._config, shape, role, device, seconds, hardware.host_bytes_per_s
        ).recomputed_fraction

    def _train_token_s(self, shape: Shape, passes: float) -> float:
        flops = _flops(self._config, shape, self._context) / self._hardware.train_flops
        exchanged = self._stages * self._collectives_s(gradient_exchange(self._config, shape))
        held = self._config, parameters_per_rank(self._config, shape), self._copies
        exchanged += gradient_traffic(*held).seconds(self._hardware) + self._host_copy_s(
            offloaded_gradient_bytes(*held)
        )
        once = (passes * self._launch_s(shape) + exchanged) / self._micro_batch
        computed = passes * (flops + self._hidden_states_s(shape)) + (passes - 1) * self._all_reduce_s(shape)
        return self._width * (computed + once + 2 * self._all_to_all_s(shape) + self._send_recv_s(shape))

    def _launch_s(self, shape: Shape) -> float:
        """Return the fixed seconds of a micro-batch's forward pass through all stages."""
        links = self._hardware.links
        handed_on = (self._stages - 1) * links.send(0, self._spans_nodes)
        if self._config.training.vocabulary_parallel:
            handed_on += links.all_reduce(0, self._stages)
        launched = (len(shape.layers) + self._stages * END_LAYERS) * self._hardware.layer_s
        return launched + 2 * len(shape.layers) * links.all_reduce(0, self._width) + handed_on

    def _hidden_states_s(self, shape: Shape) -> float:
        return len(shape.layers) * shape.hidden * self._item / self._hardware.hidden_bytes_per_s

    def _collectives_s(self, exchange: Exchange) -> float:
        launched = max(exchange.modules * self._hardware.gather_s, exchange.messages * self._gather(0))
        sent = self._gather(exchange.sent(self._hardware)) if exchange.bytes else 0.0
        copied = exchange.copies.seconds(self._hardware) if self._copies > 1 else 0.0
        return launched + sent + copied

    def _all_reduce_s(self, shape: Shape) -> float:
        """Return the seconds per token of tensor-parallel all-reduces in a forward pass."""
        if self._width == 1:
            return 0.0
        links, size = self._hardware.links, 2 * len(shape.layers) * shape.hidden * self._item
        copied = Traffic(2 * size).seconds(self._hardware)
        return copied + links.all_reduce(size, self._width) - links.all_reduce(0, self._width)

    def _gather(self, size: float) -> float:
        """Return the seconds to gather or scatter a stage's share of `size` bytes."""
        return self._hardware.links.all_gather(size / self._stages, self._copies, self._stages * self._width)

    def _all_to_all_s(self, shape: Shape) -> float:
        """Return the seconds per token of the Ulysses all-to-alls (queries, keys, values, outputs of each layer), if
        sequences exceed a rank's token budget."""
        config = self._config
        longest = config.data.max_prompt_length + config.data.max_response_length
        degree = config.training.ulysses_sequence_parallel_size
        if degree == 1 or longest <= config.actor.ppo_max_token_len_per_gpu:
            return 0.0
        size = self._micro_batch * shape.hidden / self._width * self._item * (degree - 1) / degree
        each = self._hardware.links.send(size, degree * self._width > self._hardware.links.per_node)
        return 4 * len(shape.layers) * each / self._micro_batch

    def _send_recv_s(self, shape: Shape) -> float:
        """Return the seconds per token of sending hidden states and gradients between stages, and to a shared head."""
        if self._stages == 1:
            return 0.0
        links, far = self._hardware.links, self._spans_nodes
        times = 2 + 2 * self._config.training.vocabulary_parallel * logits_fraction(self._config.data)
        return times * (links.send(shape.hidden * self._item, far) - links.send(0, far))

    def optimizer_s(self) -> float:
        return self._hardware.optimizer_s + sum(map(self._step_s, self._trained)) / len(self._trained)

    def _step_s(self, shape: Shape) -> float:
        held, hardware = parameters_per_rank(self._config, shape) / self._stages, self._hardware
        moved = step_traffic(self._config, held, self._copies).seconds(hardware)
        if self._config.actor.offload_optimizer:  # host memory is assumed to be no faster than the link to it
            states = optimizer_bytes(held / self._copies, self._item)
            moved += states / min(hardware.update_rate, hardware.host_bytes_per_s) - states / hardware.update_rate
            moved += self._host_copy_s(offloaded_step_bytes(self._config, held, self._copies))
        return self._collectives_s(step_exchange(self._config, shape)) + moved

    def _host_copy_s(self, size: float) -> float:
        """Return the seconds to copy `size` bytes between a device and host memory (on CPUs: the same memory)."""
        if self._hardware.is_host:
            return Traffic(2 * size).seconds(self._hardware)
        return size / self._hardware.host_bytes_per_s

    def offload_traffic(self) -> tuple[float, float]:
        """Return (bytes, seconds) per step of gradients to host optimizers and weights back."""
        data, size = self._config.data, 0.0
        for shape in self._trained:
            held = self._config, parameters_per_rank(self._config, shape) / self._stages, self._copies
            size += self._rank_tokens / self._micro_batch * offloaded_gradient_bytes(*held) + offloaded_step_bytes(
                *held
            )
        size *= self._config.actor.ppo_epochs * -(-data.train_batch_size // self._config.actor.ppo_mini_batch_size)
        return size, self._host_copy_s(size)

    def switch_s(self, moved: Moved) -> float:
        speed, residency = self._hardware.host_bytes_per_s, self._config.actor.optimizer_residency
        if residency == "step":
            return (moved.all - moved.optimizers) / speed
        hidden = self.overlapped_transfer_s(moved.optimizers) if residency == "forecast" else 0.0
        return moved.all / speed - hidden / 2

    def overlapped_transfer_s(self, optimizers: float) -> float:
        """Return the minimum seconds of moving optimizer state that overlap with the first mini-batch's gradients."""
        rows = self._config.actor.ppo_mini_batch_size * self._config.rollout.n
        flops = 3 * min(_flops(self._config, each, self._context) for each in self._trained)
        gradients = rows * self._context / self._copies * flops / self._stages / self._hardware.train_flops
        return min(optimizers / self._hardware.host_bytes_per_s, gradients)

    def optimizer_transfer_s(self, optimizers: float) -> float:
        """Return the mean transfer seconds of an optimizer that is on the device only during its steps."""
        if self._config.actor.optimizer_residency != "step":
            return 0.0
        return 2 * optimizers / len(self._trained) / self._hardware.host_bytes_per_s

    def push_s(self) -> float:
        """Return the seconds to gather new weights and copy them to an engine."""
        weights, links = self._policy.parameters * self._item, self._hardware.links
        gathered = self._collectives_s(pass_exchange(self._config, self._policy))
        stages = links.all_gather(weights, self._stages * self._width)
        return gathered + stages + 2 * weights / self._hardware.bytes_per_s


def _flops(config: Config, shape: Shape, context: float) -> float:
    """Return the FLOP per token of a rank's forward pass; only response positions use the LM head."""
    data = config.data
    kept = data.max_response_length / (data.max_prompt_length + data.max_response_length)
    scores = 4 * len(shape.layers) * shape.heads * shape.head_width * context / 2
    width = config.training.tensor_model_parallel_size
    return (2 * shape.passed + scores) / width + 2 * shape.head * kept
