"""Find settings that make a job fit into memory; each is tried on the memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.parallelism import value_of
from rlfuse.config.schema import Config
from rlfuse.engines.memory.estimate import GIB, MIB, Budget, Memory, memory_of
from rlfuse.engines.memory.model_sizes import Shape
from rlfuse.engines.memory.residency import GENERATING, PHASES, TRAINING
from rlfuse.engines.trainer.backends import model_memory


def problems(config: Config, memory: Memory) -> list[str]:
    """Return one line per phase or cache that does not fit: what, by how much, and its largest parts. For settings that
    help, see `remedies`."""
    found = []
    longest = config.data.max_prompt_length + config.data.max_response_length
    if memory.generates and memory.kv_tokens < longest:
        key = "rollout.gpu_memory_utilization" if memory.budget.device == "cuda" else "rollout.kv_cache_memory_mb"
        have = f"room for {memory.kv_tokens} tokens" if memory.kv_tokens > 0 else "no room next to the engine's weights"
        found.append(
            f"generating: the KV cache has {have}, but the longest sample needs {longest} (data.max_prompt_length + "
            f"data.max_response_length); {key}={getattr(config.rollout, key.split('.')[1])}, "
            f"rollout.tensor_model_parallel_size={config.rollout.tensor_model_parallel_size}"
        )
    for phase in memory.phases:
        total = memory.total(phase)
        if total > memory.budget.bytes:
            found.append(_too_much(memory, phase, total))
    waiting, host = memory.host * config.trainer.n_gpus_per_node, memory.budget.host
    if host is not None and waiting > host:
        found.append(
            f"a node's host memory: needs {waiting / GIB:.1f} GiB of pinned memory for data offloaded from its "
            f"{config.trainer.n_gpus_per_node} devices, but has {host / GIB:.1f} (host_memory_gb); "
            f"{config.sharding}, actor.offload_optimizer={config.actor.offload_optimizer}"
        )
    return found


def _too_much(memory: Memory, phase: str, total: float) -> str:
    inside = sorted(memory.of(phase), key=lambda part: -part.size)
    largest = ", ".join(f"{part.role}'s {part.what} {part.size / GIB:.2f}" for part in inside[:3])
    over, limit = total - memory.budget.bytes, memory.budget.bytes
    where = f"{phase}: " if memory.budget.device == "cuda" else ""
    return (
        f"{where}needs {total / GIB:.2f} GiB of a device's {limit / GIB:.2f}, {over / GIB:.2f} too many. Largest: "
        f"{largest}."
    )


Setting = tuple[str, object]  # key and value


def remedies(
    config: Config, shapes: Mapping[str, Shape], budget: Budget, served: Mapping[str, Shape] | None = None
) -> str:
    """Return a sentence with the settings that are sufficient alone, otherwise a sufficient combination, if any."""
    plan = _Plan(config, shapes, budget, served or {})
    families = list(_families(config, plan.memory))
    alone = [found for family in families if (found := next((each for each in family if plan.fits([each])), None))]
    if alone:
        return f"It fits with {'; or with '.join(map(_words, alone))}."
    strongest = (next((each for each in reversed(family) if plan.valid([each])), None) for family in families)
    together = [each for each in strongest if each]
    if not together or not plan.fits(together):
        return "None of the tried settings makes it fit. Use devices with more memory, or a smaller model."
    for setting in list(together):
        if plan.fits(fewer := [each for each in together if each != setting]):
            together = fewer
    return f"It fits with {', '.join(map(_words, together))} together."


class _Plan:
    """The job with other settings."""

    def __init__(self, config: Config, shapes: Mapping[str, Shape], budget: Budget, served: Mapping[str, Shape]):
        self._config, self._given = config, (shapes, budget, served)
        actor = shapes["actor"]
        self._facts = Facts(
            attention_heads=actor.heads, layers=len(actor.layers), video=actor.tower > 0, cuda=budget.device == "cuda"
        )
        self._known = set(check(config, self._facts))
        self.memory = memory_of(config, *self._given)

    def valid(self, settings: Sequence[Setting]) -> bool:
        return set(check(changed(self._config, settings), self._facts)) <= self._known

    def fits(self, settings: Sequence[Setting]) -> bool:
        if not self.valid(settings):
            return False
        config = changed(self._config, settings)
        return not problems(config, memory_of(config, *self._given))


def changed(config: Config, settings: Iterable[Setting]) -> Config:
    """Return the configuration with these settings."""
    groups: dict[str, dict[str, object]] = {}
    for key, value in settings:
        group, name = key.split(".")
        groups.setdefault(group, {})[name] = value
    return replace(config, **{group: replace(getattr(config, group), **values) for group, values in groups.items()})


def _words(setting: Setting) -> str:
    key, value = setting
    return f"{key}={str(value).lower()}" + (" (more machines)" if key == "trainer.nnodes" else "")


def _families(config: Config, memory: Memory) -> Iterator[list[Setting]]:
    """Yield lists of settings that could help, one list per key, mildest value first."""
    tight = {phase for phase in memory.phases if memory.total(phase) > memory.budget.bytes}
    longest, device = config.data.max_prompt_length + config.data.max_response_length, memory.budget.device
    if TRAINING in tight:
        if not config.model.enable_gradient_checkpointing:
            yield [("model.enable_gradient_checkpointing", True)]
        if not config.model.enable_activation_offload:
            yield [("model.enable_activation_offload", True)]
        tokens = config.actor.ppo_max_token_len_per_gpu
        if fewer := sorted({max(longest, tokens // 2), max(longest, tokens // 4)} - {tokens}, reverse=True):
            yield [("actor.ppo_max_token_len_per_gpu", each) for each in fewer if each < tokens]
        degree = config.training.ulysses_sequence_parallel_size
        yield [("training.ulysses_sequence_parallel_size", degree * times) for times in (2, 4, 8)]
    if tight - {GENERATING}:
        for key, (*_, least) in model_memory(config).choices.items():
            if value_of(config, key) != least:
                yield [(key, least)]
        if device == "cuda" and not config.actor.offload_optimizer:
            if config.actor.optimizer_residency != "step":
                yield [("actor.optimizer_residency", "step")]
            yield [("actor.offload_optimizer", True)]
    if GENERATING in tight or (memory.generates and memory.kv_tokens < longest):
        width = config.rollout.tensor_model_parallel_size
        yield [("rollout.tensor_model_parallel_size", width * times) for times in (2, 4, 8)]
        yield _caches(config, memory, longest)
    if tight & set(PHASES):
        yield [("trainer.nnodes", config.trainer.nnodes * times) for times in (2, 4, 8)]


def _caches(config: Config, memory: Memory, longest: int) -> list[Setting]:
    """Return other sizes of the engine's cache: on GPUs other fractions, nearest first; on CPU hosts the minimum for
    the longest sample. The configured fraction is last, for combination with other settings, as none is the
    strongest."""
    if memory.budget.device == "cuda":
        given = config.rollout.gpu_memory_utilization
        shares = sorted({share / 20 for share in range(2, 20)} - {given}, key=lambda share: abs(share - given))
        return [("rollout.gpu_memory_utilization", share) for share in (*shares, given)]
    cache = next(part.size for part in memory.parts if part.what == "KV cache")
    least = ceil(cache * longest / max(1, memory.kv_tokens) / MIB)
    return [("rollout.kv_cache_memory_mb", least), ("rollout.kv_cache_memory_mb", least + 1)]
