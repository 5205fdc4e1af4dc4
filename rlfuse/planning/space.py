"""Which plans there are: values of every key that changes speed or memory and not what is learned.

Role: `search` goes through `candidates`. Pure. The axes are keys of a job; a key that the user keeps stays as it is.
Invariant: a candidate passes every check of the configuration that the job as given passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product

from rlfuse.config.checks import check, value_of
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.fusion.policies import POLICIES
from rlfuse.planning import hypothetical
from rlfuse.planning.cluster_file import Cluster
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.remedies import Setting, changed

STRUCTURE = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "rollout.tensor_model_parallel_size",
    "training.pipeline_parallel_size",
    "training.ulysses_sequence_parallel_size",
    "actor.zero_stage",
    "actor.offload_optimizer",
)
POLICY = "fusion.policy"
"""The only axis that memory does not depend on: every plan is simulated under all of them."""
CACHE = {"cuda": "rollout.gpu_memory_utilization", "cpu": "rollout.kv_cache_memory_mb"}
FEW_NODES = 8
"""Up to here every number of nodes is tried, above it powers of two and all."""

Axes = Mapping[str, tuple[object, ...]]


def axes_of(config: Config, shape: Shape, cluster: Cluster, keep: Collection[str] = ()) -> dict[str, tuple]:
    """Key -> its values, the mildest first; `keep`: keys that stay as the job has them."""
    gpu, nodes, each = cluster.device == "cuda", cluster.nodes, cluster.devices_per_node
    axes = {
        "trainer.nnodes": tuple(range(1, nodes + 1)) if nodes <= FEW_NODES else (*_powers(nodes - 1), nodes),
        "trainer.n_gpus_per_node": (each,) if nodes > 1 else tuple(sorted({*_powers(each), each})),
        "rollout.tensor_model_parallel_size": _powers(min(each, shape.heads)),
        "training.pipeline_parallel_size": _powers(min(cluster.devices, len(shape.layers), 16)),
        "training.ulysses_sequence_parallel_size": _powers(min(cluster.devices, 16)),
        "actor.zero_stage": (0, 1, 2, 3),
        "actor.offload_optimizer": (False, True) if gpu else (False,),
        "model.enable_gradient_checkpointing": (False, True),
        "actor.ppo_max_token_len_per_gpu": _tokens(config),
        "rollout.max_num_seqs": _with(config.rollout.max_num_seqs, (64, 128, 256, 512, 1024)),
        CACHE[cluster.device]: (0.9, 0.8, 0.7, 0.6, 0.5, 0.4) if gpu else (4096, 2048, 1024, 512, 256),
        POLICY: tuple(dict.fromkeys((config.fusion.policy, *POLICIES))),
    }
    return {key: (value_of(config, key),) if key in keep else values for key, values in axes.items()}


def _with(given: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """And what the job has."""
    return tuple(sorted({given, *values}))


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()))


def _tokens(config: Config) -> tuple[int, ...]:
    """Token budgets from a sixteenth of the longest sample up, of which Ulysses cuts as many at most."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    given = {1 << power for power in range(12, 17)} | {longest, config.actor.ppo_max_token_len_per_gpu}
    return tuple(sorted(tokens for tokens in given if tokens >= longest // 16))


def structural(key: str) -> bool:
    """Whether others have to go with it; plans that differ in such an axis are plans of their own to a reader."""
    return key in STRUCTURE or key.startswith(hypothetical.GROUP)


def structures(config: Config, facts: Facts, axes: Axes, shape: Shape) -> Iterator[tuple[Setting, ...]]:
    """Settings of the axes that have to go together, and do."""
    known, keys = set(check(config, facts)), [key for key in axes if structural(key)]
    for values in product(*(axes[key] for key in keys)):
        settings = tuple(zip(keys, values, strict=True))
        there = changed(config, settings)
        if _divide(there) and not any(hypothetical.problems(there, shape)) and not set(check(there, facts)) - known:
            yield settings


def _divide(config: Config) -> bool:
    """Whether degrees go into the devices; the checks know more, and take longer."""
    training, slots = config.training, config.slots
    cut = training.pipeline_parallel_size * training.ulysses_sequence_parallel_size
    return slots % cut == 0 and config.trainer.n_gpus_per_node % config.rollout.tensor_model_parallel_size == 0


def fillings(axes: Axes) -> list[tuple[Setting, ...]]:
    """Settings of the other axes, the fastest first, were there room for it; but the size of the engine's cache.

    That follows from the memory that is left: the largest that fits.
    """
    fastest = {
        "model.enable_gradient_checkpointing": axes["model.enable_gradient_checkpointing"],
        "actor.ppo_max_token_len_per_gpu": axes["actor.ppo_max_token_len_per_gpu"][::-1],
        "rollout.max_num_seqs": axes["rollout.max_num_seqs"][::-1],
    }
    return [tuple(zip(fastest, values, strict=True)) for values in product(*fastest.values())]
