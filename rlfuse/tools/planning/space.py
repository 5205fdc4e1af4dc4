"""The search space of plans: values of every key that changes speed or memory but not the training result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any

from rlfuse.config.checks import Check, check, checks, value_of
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.engines.memory.activations import largest_activation_plan, layer_costs
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.remedies import Setting
from rlfuse.engines.pipeline.partition import logits_fraction
from rlfuse.engines.trainer.activation_placement import Place
from rlfuse.engines.trainer.backends import model_memory
from rlfuse.errors import EngineError
from rlfuse.fusion.policies import POLICIES
from rlfuse.tools.planning.cluster_file import Cluster

OFFLOAD, RESIDENCY = "actor.offload_optimizer", "actor.optimizer_residency"
CHECKPOINTING, TOKEN_BUDGET = "model.enable_gradient_checkpointing", "actor.ppo_max_token_len_per_gpu"
SEQUENCES = "rollout.max_num_seqs"
CHUNKS, PLACEMENT = "training.virtual_pipeline_model_parallel_size", "training.pipeline_placement"
VOCABULARY = "training.vocabulary_parallel"
POLICY = "fusion.policy"  # does not affect memory: plans are simulated under every policy
CACHE = {"cuda": "rollout.gpu_memory_utilization", "cpu": "rollout.kv_cache_memory_mb"}
FILLING_KEYS = (
    CHECKPOINTING,
    TOKEN_BUDGET,
    SEQUENCES,
    *CACHE.values(),
    POLICY,
)  # keys of a filling; the other keys form the structure
FEW_NODES = 8  # up to this size every number of nodes is tried, above it powers of two and all nodes

Axes = Mapping[str, tuple[object, ...]]
Filling = tuple[int, int, int]
FASTEST: Filling = (0, 0, 0)


def axes_of(config: Config, shape: Shape, cluster: Cluster, keep: Collection[str] = ()) -> dict[str, tuple]:
    """Return the values to try by key; keys in `keep` have only the job's value."""
    gpu, each = cluster.device == "cuda", max(cluster.sizes)
    axes = {
        "trainer.nnodes": _nodes(cluster),
        "trainer.n_gpus_per_node": cluster.sizes if cluster.nodes > 1 else tuple(sorted({*_powers(each), each})),
        "rollout.tensor_model_parallel_size": _powers(min(each, shape.heads)),
        "training.pipeline_parallel_size": _powers(min(cluster.devices, len(shape.layers), 16)),
        CHUNKS: _including(config.training.virtual_pipeline_model_parallel_size, (1, 2)),
        PLACEMENT: ("v", "interleaved"),
        VOCABULARY: (False, True) if _has_large_head(config, shape) else (config.training.vocabulary_parallel,),
        "training.tensor_model_parallel_size": _tensor_parallel_sizes(shape, min(each, shape.heads)),
        "training.ulysses_sequence_parallel_size": _ulysses_degrees(
            config, min(cluster.devices, 16), TOKEN_BUDGET in keep
        ),
        **model_memory(config).choices,
        OFFLOAD: (False, True) if gpu else (False,),
        RESIDENCY: ("forecast", "step") if gpu else ("training",),  # "training" is never faster, nor smaller
        "model.enable_activation_offload": (False, True)
        if _exceeds_device_memory(config, shape, cluster.device)
        else (False,),
        "rollout.quantization": tuple(dict.fromkeys((None, config.rollout.quantization))),
        CHECKPOINTING: (False, True),
        TOKEN_BUDGET: _token_budgets(config),
        SEQUENCES: _including(config.rollout.max_num_seqs, (64, 128, 256, 512, 1024)),
        CACHE[cluster.device]: _cache_sizes(config, gpu),
        POLICY: tuple(dict.fromkeys((config.fusion.policy, *POLICIES))),
    }
    return {key: (value_of(config, key),) if key in keep else values for key, values in axes.items()}


def _nodes(cluster: Cluster) -> tuple[int, ...]:
    if cluster.nodes <= FEW_NODES:
        return tuple(range(1, cluster.nodes + 1))
    return tuple(sorted({*_powers(cluster.nodes - 1), *map(cluster.nodes_with, cluster.sizes)}))


def _exceeds_device_memory(config: Config, shape: Shape, device: str) -> bool:
    """Return whether the longest samples exceed device memory with any split and packing."""
    one = replace(config.actor, ppo_max_token_len_per_gpu=1, ppo_micro_batch_size_per_gpu=1)
    training = replace(config.training, pipeline_parallel_size=1, ulysses_sequence_parallel_size=1)
    model = replace(config.model, enable_activation_offload=True, enable_gradient_checkpointing=False)
    longest = replace(config, actor=one, training=training, model=model)
    return set(largest_activation_plan(longest, shape, "actor", device).places.layers) != {Place.DEVICE}


def _has_large_head(config: Config, shape: Shape) -> bool:
    layers, _, head = layer_costs(shape, logits_fraction(config.data))
    return head >= max(layers)


def _including(given: float, values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sorted({given, *values}))


def _cache_sizes(config: Config, gpu: bool) -> tuple[float, ...]:
    """Return the sizes, largest first."""
    given, values = (
        (config.rollout.gpu_memory_utilization, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
        if gpu
        else (config.rollout.kv_cache_memory_mb, (256, 512, 1024, 2048, 4096))
    )
    return _including(given, values)[::-1]


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()))


def _tensor_parallel_sizes(shape: Shape, most: int) -> tuple[int, ...]:
    return tuple(width for width in _powers(most) if width == 1 or _is_divisible(shape, width))


def _is_divisible(shape: Shape, width: int) -> bool:
    try:
        shape.share(width)
    except EngineError:
        return False
    return True


def _token_budgets(config: Config) -> tuple[int, ...]:
    """Return token budgets from a sixteenth of the longest sample up."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    given = {1 << power for power in range(12, 17)} | {longest, config.actor.ppo_max_token_len_per_gpu}
    return tuple(sorted(tokens for tokens in given if tokens >= longest // 16))


def _ulysses_degrees(config: Config, most: int, one_budget: bool) -> tuple[int, ...]:
    """Return Ulysses degrees up to the one at which shards of the longest sample fit every token budget, at least 2.
    Higher degrees need as much memory and communicate more."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    least = config.actor.ppo_max_token_len_per_gpu if one_budget else min(_token_budgets(config))
    return _powers(min(most, max(2, 1 << (-(-longest // least) - 1).bit_length())))


def is_structural(key: str) -> bool:
    """Return whether the key belongs to the structure of a plan; the tables list one plan per structure."""
    return key not in FILLING_KEYS


def structures(
    config: Config, facts: Facts, axes: Axes, shape: Shape, cluster: Cluster | None = None
) -> Iterator[tuple[Setting, ...]]:
    """Yield valid combinations of structural keys, most machines first; `cluster`: only those that it has nodes for."""
    known = set(check(config, facts))
    refusals: list[Refusal] = [partial(_adds_problem, known, find, facts) for find in checks(config)]
    refusals.append(partial(_has_unused_pipeline_keys, config))
    refusals.append(lambda there: there.actor.offload_optimizer and there.actor.optimizer_residency == "step")
    if cluster is not None:
        refusals.append(lambda there: any(cluster.missing_for(there)))
    values = {key: each[:: -1 if key == "trainer.nnodes" else 1] for key, each in axes.items() if is_structural(key)}
    for settings in combinations(config, values, refusals):
        yield tuple(settings.items())


def _adds_problem(known: Collection[str], find: Check, facts: Facts, there: Config) -> bool:
    return any(line not in known for line in find(there, facts))


def _has_unused_pipeline_keys(config: Config, there: Config) -> bool:
    """Return True if pipeline keys are set without a pipeline, or placement is set for one stage per device."""
    training = there.training
    if training.pipeline_parallel_size == 1 and training.vocabulary_parallel:
        return True
    if training.virtual_pipeline_model_parallel_size != 1:
        return training.pipeline_parallel_size == 1
    return training.pipeline_placement != config.training.pipeline_placement


def with_setting(settings: tuple[Setting, ...], key: str, value: object) -> tuple[Setting, ...]:
    """Return the settings with one value replaced; without a pipeline, pipeline-only keys are reset."""
    given = dict(settings) | {key: value}
    if (key, value) == ("training.pipeline_parallel_size", 1):
        given |= {own: alone for own, alone in ((CHUNKS, 1), (VOCABULARY, False)) if own in given}
    return tuple(given.items())


class Fillings:
    """Values of FILLING_KEYS except the KV cache, which takes the remaining memory. A filling is a tuple of
    indices into these values, fastest first."""

    def __init__(self, axes: Axes):
        self._axes = {
            CHECKPOINTING: axes[CHECKPOINTING],
            TOKEN_BUDGET: axes[TOKEN_BUDGET][::-1],
            SEQUENCES: axes[SEQUENCES][::-1],
        }
        recompute, tokens, sequences = (len(values) - 1 for values in self._axes.values())
        self.smallest: Filling = (recompute, tokens, sequences)

    def settings(self, filling: Filling) -> tuple[Setting, ...]:
        return tuple((key, values[at]) for (key, values), at in zip(self._axes.items(), filling, strict=True))

    def first(self, structure: Iterable[Setting]) -> list[Filling]:
        return [(0, at, 0) for at in range(1 if _larger_is_faster(structure) else len(self._axes[TOKEN_BUDGET]))]

    def after(self, structure: Iterable[Setting], filling: Filling, fits: bool) -> Iterator[Filling]:
        """Yield the next fillings, none of which has a lower bound. With equal sequences, recomputation and (if
        `_larger_is_faster`) smaller micro-batches only take longer, so they are skipped if the filling fits."""
        recompute, tokens, sequences = filling
        if sequences < self.smallest[2]:
            yield recompute, tokens, sequences + 1
        if fits or sequences:
            return
        if recompute < self.smallest[0]:
            yield recompute + 1, tokens, 0
        if not recompute and tokens < self.smallest[1] and _larger_is_faster(structure):
            yield 0, tokens + 1, 0


def _larger_is_faster(structure: Iterable[Setting]) -> bool:
    """Return whether larger micro-batches are never slower. They may be with pipelines (longer bubbles) and with
    activation offload (transfers that do not overlap)."""
    given = dict(structure)
    return given["training.pipeline_parallel_size"] == 1 and not given.get("model.enable_activation_offload")


Refusal = Callable[[Any], bool]  # pure function: True if a configuration is invalid


def combinations(
    config: Config, values: Mapping[str, Sequence[object]], refusals: Sequence[Refusal]
) -> Iterator[dict[str, object]]:
    """Yield all valid combinations of these values; all other keys have the values of `config`."""
    keys = list(values)

    def extended(settings: dict[str, object], open_refusals: Sequence[_CachedRefusal]) -> Iterator[dict[str, object]]:
        still_open = []
        for refusal in open_refusals:
            refused = refusal(settings)
            if refused:
                return
            if refused is None:
                still_open.append(refusal)
        if len(settings) == len(keys):
            yield settings
            return
        key = keys[len(settings)]
        for value in values[key]:
            yield from extended({**settings, key: value}, still_open)

    yield from extended({}, [_CachedRefusal(refusal, config, frozenset(keys)) for refusal in refusals])


class _CachedRefusal:
    """A check that is evaluated once for each combination of the values that it reads."""

    def __init__(self, refusal: Refusal, config: Config, keys: frozenset[str]):
        self._refusal, self._config, self._keys = refusal, config, keys
        self._answers: dict[tuple[tuple[str, object], ...], bool | str] = {}
        """Settings read so far -> result, or the key that is read next."""

    def __call__(self, settings: Mapping[str, object]) -> bool | None:
        """Return the result for all configurations with these settings; None if it depends on other keys."""
        read: tuple[tuple[str, object], ...] = ()
        while True:
            if read not in self._answers:
                self._answers[read] = self._result_with(dict(read))
            answer = self._answers[read]
            if isinstance(answer, bool):
                return answer
            if answer not in settings:
                return None
            read += ((answer, settings[answer]),)

    def _result_with(self, settings: Mapping[str, object]) -> bool | str:
        try:
            return self._refusal(_Partial(self._config, self._keys, settings))
        except _Undecided as still:
            return still.key


class _Undecided(Exception):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class _Partial:
    """A configuration (or group) with undecided keys; reading one raises `_Undecided`."""

    def __init__(self, node: object, keys: frozenset[str], settings: Mapping[str, object], prefix: str = ""):
        self._node, self._keys, self._settings, self._prefix = node, keys, settings, prefix

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._settings:
            return self._settings[key]
        if key in self._keys:
            raise _Undecided(key)
        known = getattr_static(type(self._node), name, None)
        if isinstance(known, property):
            return known.fget(self)
        if isinstance(known, FunctionType):
            return MethodType(known, self)
        value = getattr(self._node, name)
        return _Partial(value, self._keys, self._settings, f"{key}.") if is_dataclass(value) else value
