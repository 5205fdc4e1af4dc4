"""Seconds of each kind of work of any job, from a model's shape and what a device and its links do.

Role: `forecast` and `search` simulate steps on these costs. Pure.
Per slot of an engine, which spans `rollout.tensor_model_parallel_size` devices; a trainer rank is one device. Tensor
parallelism all-reduces twice a layer (Megatron, arXiv 1909.08053). ZeRO 0 all-reduces gradients once a step, 1 scatters
them and gathers weights, 2 scatters in each micro-batch, 3 gathers all weights forward and backward besides. Ulysses
exchanges four times a layer each way. Collective operations overlap with nothing, as trainer ranks run them
(`overlap_comm` is off).
"""

from __future__ import annotations

from collections.abc import Mapping

from rlfuse.config.schema import Config
from rlfuse.fusion.costs import Costs
from rlfuse.planning.hardware import ADAM, Hardware
from rlfuse.planning.memory import ITEM, STATES
from rlfuse.planning.model_sizes import Shape


def costs_of(
    config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float, moved: float = 0.0
) -> Costs:
    """`context`: tokens of a sample with its prompt, in the mean; `moved`: bytes that a slot moves to change roles."""
    width = config.rollout.tensor_model_parallel_size
    ranks = _Ranks(config, shapes, hardware, context)
    waits = hardware.host_bytes_per_s
    return Costs(
        **_decoding(config, shapes["actor"], hardware),
        max_sequences=config.rollout.max_num_seqs,
        max_tokens=config.data.max_response_length,
        score_tokens_per_s=width / ranks.score_token_s(),
        score_call_s=hardware.pass_call_s,
        train_tokens_per_s=width / ranks.train_token_s(),
        train_call_s=hardware.train_call_s,
        optimizer_s=ranks.optimizer_s(),
        switch_s=moved / waits,
        link_bytes_per_s=0.0 if waits == float("inf") else waits / 2,  # a cache is carried through the host's memory
        step_s=ranks.push_s() + hardware.step_s,
    )


def _decoding(config: Config, shape: Shape, hardware: Hardware) -> dict[str, float]:
    """Fields of `Costs`: reading weights until a batch is flat no more, then computing."""
    width, item, links = config.rollout.tensor_model_parallel_size, ITEM[config.model.dtype], hardware.links
    flops, speed, cached = hardware.decode_flops * width, hardware.bytes_per_s * width, shape.cache.bytes_of(1, item)
    token = 2 * (shape.passed + shape.head)  # every decoded token passes the head
    reduced = 2 * len(shape.layers) * shape.hidden * item
    sent = links.all_reduce(reduced, width) - links.all_reduce(0, width)
    read = (sum(shape.layers) + shape.head) * item / speed
    flat = max(1, int(read * flops / token))
    start = hardware.decode_step_s + 2 * len(shape.layers) * links.all_reduce(0, width)
    return {
        "step_base_s": read + start + hardware.decode_sequence_s * flat,
        "step_per_sequence_s": token / flops + sent + hardware.decode_sequence_s,
        "step_per_context_token_s": cached / speed,
        "flat_batch": flat,
        "prefill_tokens_per_s": 1 / (2 * shape.passed / (hardware.pass_flops * width) + sent),
        "kv_bytes_per_token": cached,
    }


class _Ranks:
    """Trainer ranks: seconds of one of them. Those of a token are of all stages together, which a rank's share of the
    tokens takes it: in pipelines it runs a stage of that many times as many."""

    def __init__(self, config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float):
        self._config, self._hardware, self._context = config, hardware, context
        self._item, self._zero = ITEM[config.model.dtype], config.actor.zero_stage
        self._stages = config.training.pipeline_parallel_size
        self._copies = config.slots // self._stages
        self._policy, self._trained = shapes["actor"], [each for role, each in shapes.items() if role != "reference"]
        each = config.actor.ppo_mini_batch_size * config.rollout.n * context / self._copies
        self._micro_batch = max(1.0, min(config.actor.ppo_max_token_len_per_gpu, each))

    def score_token_s(self) -> float:
        """Of a pass without gradients."""
        shape, flops = self._policy, max(_flops(self._config, each, self._context) for each in self._trained)
        gathered = self._stages * self._gather(shape.parameters * self._item) if self._zero == 3 else 0.0
        computed = flops / self._hardware.pass_flops + self._hidden_s(shape)
        return computed + (gathered + self._begun_s(shape)) / self._micro_batch + self._exchanged(shape)

    def train_token_s(self) -> float:
        """Of forward and backward of the larger model."""
        again = self._config.model.enable_gradient_checkpointing
        return max(self._train_token_s(shape, 4 if again else 3) for shape in self._trained)

    def _train_token_s(self, shape: Shape, passes: int) -> float:
        flops = _flops(self._config, shape, self._context) / self._hardware.train_flops
        once = (passes * self._begun_s(shape) + self._sums(shape)) / self._micro_batch
        computed = passes * (flops + self._hidden_s(shape))
        return computed + once + 2 * self._exchanged(shape) + self._handed_on(shape)

    def _begun_s(self, shape: Shape) -> float:
        """Of a micro-batch's forward pass through all stages, beside its tokens."""
        links = self._hardware.links
        handed_on = (self._stages - 1) * links.send(0, self._stages > links.per_node)
        return self._stages * self._hardware.micro_batch_s + len(shape.layers) * self._hardware.layer_s + handed_on

    def _hidden_s(self, shape: Shape) -> float:
        """Of a token's hidden states in a forward pass."""
        return len(shape.layers) * shape.hidden * self._item / self._hardware.hidden_bytes_per_s

    def _sums(self, shape: Shape) -> float:
        """Of a micro-batch's gradients and weights, where ZeRO divides these."""
        if self._zero < 2:
            return 0.0
        weights = 2 * self._gather(shape.parameters * self._item) if self._zero == 3 else 0.0
        return self._stages * (weights + self._gather(shape.parameters * self._gradient))

    @property
    def _gradient(self) -> int:
        return max(self._item, ITEM[self._config.actor.grad_accum_dtype])

    def _gather(self, size: float) -> float:
        """All-gather or reduce-scatter of a stage's share of so many bytes, among those that have the same stage."""
        return self._hardware.links.all_gather(size / self._stages, self._copies, self._stages)

    def _exchanged(self, shape: Shape) -> float:
        """Of a token's all-to-alls, where sequences are longer than a rank's budget and so are cut."""
        config = self._config
        longest = config.data.max_prompt_length + config.data.max_response_length
        degree = config.training.ulysses_sequence_parallel_size
        if degree == 1 or longest <= config.actor.ppo_max_token_len_per_gpu:
            return 0.0
        size = 4 * len(shape.layers) * shape.hidden * self._item * (degree - 1) / degree
        links = self._hardware.links
        within = degree <= links.per_node
        return size / (links.within_bytes_per_s if within else links.between_bytes_per_s)

    def _handed_on(self, shape: Shape) -> float:
        """Of a token's hidden states and their gradients, from stage to stage."""
        if self._stages == 1:
            return 0.0
        links = self._hardware.links
        far = self._stages > links.per_node
        return 2 * (links.send(shape.hidden * self._item, far) - links.send(0, far))

    def optimizer_s(self) -> float:
        """Of a model's step, in the mean of those that are trained."""
        return self._hardware.optimizer_s + sum(map(self._step_s, self._trained)) / len(self._trained)

    def _step_s(self, shape: Shape) -> float:
        held = shape.parameters / self._stages
        share = held / self._copies if self._zero else held
        sums = self._gather(shape.parameters * self._gradient) if self._zero < 2 else 0.0
        weights = self._gather(shape.parameters * (self._item if self._zero else self._gradient))
        sent = sums + (weights if self._zero < 3 else 0.0)
        if self._config.actor.offload_optimizer:  # computed where the states are, at the rate at which they travel
            return sent + share * (2 * (4 + STATES) + self._gradient + self._item) / self._hardware.host_bytes_per_s
        speed = self._hardware.optimizer_bytes_per_s or self._hardware.bytes_per_s
        return sent + ADAM * share / speed

    def push_s(self) -> float:
        """Of new weights to an engine: gathered where they lie in parts, then copied."""
        weights, links = self._policy.parameters * self._item, self._hardware.links
        gathered = self._gather(weights) if self._zero == 3 else 0.0
        stages = links.all_gather(weights, self._stages)
        return gathered + stages + 2 * weights / self._hardware.bytes_per_s


def _flops(config: Config, shape: Shape, context: float) -> float:
    """Of a forward pass per token; only tokens that predict a response pass the head."""
    data = config.data
    kept = data.max_response_length / (data.max_prompt_length + data.max_response_length)
    scores = 4 * len(shape.layers) * shape.heads * shape.head_width * context / 2
    return 2 * (shape.passed + shape.head * kept) + scores
