"""The plans there are: values of every key that changes speed or memory but not what is learned."""

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
POLICY = "fusion.policy"  # memory does not depend on it: every plan is simulated under all policies
CACHE = {"cuda": "rollout.gpu_memory_utilization", "cpu": "rollout.kv_cache_memory_mb"}
FILLING_KEYS = (CHECKPOINTING, TOKEN_BUDGET, SEQUENCES, *CACHE.values(), POLICY)  # keys that a structure is filled with
FEW_NODES = 8  # up to here every number of nodes is tried, above it powers of two and all

Axes = Mapping[str, tuple[object, ...]]
Filling = tuple[int, int, int]
FASTEST: Filling = (0, 0, 0)


def axes_of(config: Config, shape: Shape, cluster: Cluster, keep: Collection[str] = ()) -> dict[str, tuple]:
    """Key -> its values, the mildest first; `keep`: keys that stay as the job has them."""
    gpu, each = cluster.device == "cuda", max(cluster.sizes)
    axes = {
        "trainer.nnodes": _nodes(cluster),
        "trainer.n_gpus_per_node": cluster.sizes if cluster.nodes > 1 else tuple(sorted({*_powers(each), each})),
        "rollout.tensor_model_parallel_size": _powers(min(each, shape.heads)),
        "training.pipeline_parallel_size": _powers(min(cluster.devices, len(shape.layers), 16)),
        CHUNKS: _with(config.training.virtual_pipeline_model_parallel_size, (1, 2)),
        PLACEMENT: ("v", "interleaved"),
        VOCABULARY: (False, True) if _wide(config, shape) else (config.training.vocabulary_parallel,),
        "training.tensor_model_parallel_size": _shared(shape, min(each, shape.heads)),
        "training.ulysses_sequence_parallel_size": _cuts(config, min(cluster.devices, 16), TOKEN_BUDGET in keep),
        **model_memory(config).choices,
        OFFLOAD: (False, True) if gpu else (False,),
        RESIDENCY: ("forecast", "step") if gpu else ("training",),  # with the weights is never sooner, nor takes less
        "model.enable_activation_offload": (False, True) if _too_long(config, shape, cluster.device) else (False,),
        "rollout.quantization": tuple(dict.fromkeys((None, config.rollout.quantization))),
        CHECKPOINTING: (False, True),
        TOKEN_BUDGET: _tokens(config),
        SEQUENCES: _with(config.rollout.max_num_seqs, (64, 128, 256, 512, 1024)),
        CACHE[cluster.device]: _caches(config, gpu),
        POLICY: tuple(dict.fromkeys((config.fusion.policy, *POLICIES))),
    }
    return {key: (value_of(config, key),) if key in keep else values for key, values in axes.items()}


def _nodes(cluster: Cluster) -> tuple[int, ...]:
    if cluster.nodes <= FEW_NODES:
        return tuple(range(1, cluster.nodes + 1))
    return tuple(sorted({*_powers(cluster.nodes - 1), *map(cluster.nodes_with, cluster.sizes)}))


def _too_long(config: Config, shape: Shape, device: str) -> bool:
    """Return whether the longest samples exceed device memory however they are cut and packed."""
    one = replace(config.actor, ppo_max_token_len_per_gpu=1, ppo_micro_batch_size_per_gpu=1)
    training = replace(config.training, pipeline_parallel_size=1, ulysses_sequence_parallel_size=1)
    model = replace(config.model, enable_activation_offload=True, enable_gradient_checkpointing=False)
    longest = replace(config, actor=one, training=training, model=model)
    return set(largest_activation_plan(longest, shape, "actor", device).places.layers) != {Place.DEVICE}


def _wide(config: Config, shape: Shape) -> bool:
    layers, _, head = layer_costs(shape, logits_fraction(config.data))
    return head >= max(layers)


def _with(given: float, values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sorted({given, *values}))


def _caches(config: Config, gpu: bool) -> tuple[float, ...]:
    """Return the sizes, largest first."""
    given, values = (
        (config.rollout.gpu_memory_utilization, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
        if gpu
        else (config.rollout.kv_cache_memory_mb, (256, 512, 1024, 2048, 4096))
    )
    return _with(given, values)[::-1]


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()))


def _shared(shape: Shape, most: int) -> tuple[int, ...]:
    return tuple(width for width in _powers(most) if width == 1 or _cuttable(shape, width))


def _cuttable(shape: Shape, width: int) -> bool:
    try:
        shape.share(width)
    except EngineError:
        return False
    return True


def _tokens(config: Config) -> tuple[int, ...]:
    """Return token budgets from a sixteenth of the longest sample up."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    given = {1 << power for power in range(12, 17)} | {longest, config.actor.ppo_max_token_len_per_gpu}
    return tuple(sorted(tokens for tokens in given if tokens >= longest // 16))


def _cuts(config: Config, most: int, one_budget: bool) -> tuple[int, ...]:
    """Return Ulysses degrees up to that at which slices of the longest sample fit every token budget, at least 2:
    higher ones take as much memory and exchange more."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    least = config.actor.ppo_max_token_len_per_gpu if one_budget else min(_tokens(config))
    return _powers(min(most, max(2, 1 << (-(-longest // least) - 1).bit_length())))


def is_structural(key: str) -> bool:
    """Whether others have to go with it; plans that differ in such an axis are plans of their own to a reader."""
    return key not in FILLING_KEYS


def structures(
    config: Config, facts: Facts, axes: Axes, shape: Shape, cluster: Cluster | None = None
) -> Iterator[tuple[Setting, ...]]:
    """Yield valid combinations of the structural axes, most machines first; `cluster`: only those it has nodes for."""
    known = set(check(config, facts))
    refusals: list[Refusal] = [partial(_unlike, known, find, facts) for find in checks(config)]
    refusals.append(partial(_placed_for_nothing, config))
    refusals.append(lambda there: there.actor.offload_optimizer and there.actor.optimizer_residency == "step")
    if cluster is not None:
        refusals.append(lambda there: any(cluster.missing_for(there)))
    values = {key: each[:: -1 if key == "trainer.nnodes" else 1] for key, each in axes.items() if is_structural(key)}
    for settings in combinations(config, values, refusals):
        yield tuple(settings.items())


def _unlike(known: Collection[str], find: Check, facts: Facts, there: Config) -> bool:
    return any(line not in known for line in find(there, facts))


def _placed_for_nothing(config: Config, there: Config) -> bool:
    """Return whether stages or a head are split without a pipeline, or a single stage has another placement."""
    training = there.training
    if training.pipeline_parallel_size == 1 and training.vocabulary_parallel:
        return True
    if training.virtual_pipeline_model_parallel_size != 1:
        return training.pipeline_parallel_size == 1
    return training.pipeline_placement != config.training.pipeline_placement


def with_setting(settings: tuple[Setting, ...], key: str, value: object) -> tuple[Setting, ...]:
    """The settings but for one, and for what only pipelines have where that is the last of them to go."""
    given = dict(settings) | {key: value}
    if (key, value) == ("training.pipeline_parallel_size", 1):
        given |= {own: alone for own, alone in ((CHUNKS, 1), (VOCABULARY, False)) if own in given}
    return tuple(given.items())


class Fillings:
    """Settings of the other axes except the engine's cache, which takes the memory that is left. A filling is its index
    in each axis, the fastest first."""

    def __init__(self, axes: Axes):
        self._axes = {
            CHECKPOINTING: axes[CHECKPOINTING],
            TOKEN_BUDGET: axes[TOKEN_BUDGET][::-1],
            SEQUENCES: axes[SEQUENCES][::-1],
        }
        again, tokens, sequences = (len(values) - 1 for values in self._axes.values())
        self.smallest: Filling = (again, tokens, sequences)

    def settings(self, filling: Filling) -> tuple[Setting, ...]:
        return tuple((key, values[at]) for (key, values), at in zip(self._axes.items(), filling, strict=True))

    def first(self, structure: Iterable[Setting]) -> list[Filling]:
        return [(0, at, 0) for at in range(1 if _in_order(structure) else len(self._axes[TOKEN_BUDGET]))]

    def after(self, structure: Iterable[Setting], filling: Filling, fits: bool) -> Iterator[Filling]:
        """Yield the next fillings, none of which is faster by the bound. With the same number of sequences, recomputed
        activations and (where `_in_order`) smaller micro-batches only take longer: skipped if the filling fits."""
        again, tokens, sequences = filling
        if sequences < self.smallest[2]:
            yield again, tokens, sequences + 1
        if fits or sequences:
            return
        if again < self.smallest[0]:
            yield again + 1, tokens, 0
        if not again and tokens < self.smallest[1] and _in_order(structure):
            yield 0, tokens + 1, 0


def _in_order(structure: Iterable[Setting]) -> bool:
    """Return whether larger micro-batches are never slower. With stages they cause longer waits, with activation
    offload transfers that may be late."""
    given = dict(structure)
    return given["training.pipeline_parallel_size"] == 1 and not given.get("model.enable_activation_offload")


Refusal = Callable[[Any], bool]  # whether something speaks against a configuration; pure


def combinations(
    config: Config, values: Mapping[str, Sequence[object]], refusals: Sequence[Refusal]
) -> Iterator[dict[str, object]]:
    """Of these values of each key; all other keys are as `config` has them."""
    keys = list(values)

    def grown(settings: dict[str, object], open_refusals: Sequence[_Remembered]) -> Iterator[dict[str, object]]:
        left = []
        for refusal in open_refusals:
            refused = refusal(settings)
            if refused:
                return
            if refused is None:
                left.append(refusal)
        if len(settings) == len(keys):
            yield settings
            return
        key = keys[len(settings)]
        for value in values[key]:
            yield from grown({**settings, key: value}, left)

    yield from grown({}, [_Remembered(refusal, config, frozenset(keys)) for refusal in refusals])


class _Remembered:
    """A check that is evaluated once for each combination of the values that it reads."""

    def __init__(self, refusal: Refusal, config: Config, keys: frozenset[str]):
        self._refusal, self._config, self._keys = refusal, config, keys
        self._answers: dict[tuple[tuple[str, object], ...], bool | str] = {}
        """By what it has read: what it says, or which key it reads next."""

    def __call__(self, settings: Mapping[str, object]) -> bool | None:
        """Return its result for all configurations with these settings; None if it depends on other keys."""
        read: tuple[tuple[str, object], ...] = ()
        while True:
            if read not in self._answers:
                self._answers[read] = self._asked(dict(read))
            answer = self._answers[read]
            if isinstance(answer, bool):
                return answer
            if answer not in settings:
                return None
            read += ((answer, settings[answer]),)

    def _asked(self, settings: Mapping[str, object]) -> bool | str:
        try:
            return self._refusal(_Partial(self._config, self._keys, settings))
        except _Open as still:
            return still.key


class _Open(Exception):
    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class _Partial:
    """A configuration (or group) of which some keys have no value yet; reading one raises `_Open`."""

    def __init__(self, node: object, keys: frozenset[str], settings: Mapping[str, object], prefix: str = ""):
        self._node, self._keys, self._settings, self._prefix = node, keys, settings, prefix

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._settings:
            return self._settings[key]
        if key in self._keys:
            raise _Open(key)
        known = getattr_static(type(self._node), name, None)
        if isinstance(known, property):
            return known.fget(self)
        if isinstance(known, FunctionType):
            return MethodType(known, self)
        value = getattr(self._node, name)
        return _Partial(value, self._keys, self._settings, f"{key}.") if is_dataclass(value) else value
