"""Ways to run a job that this project does not have yet, as the search would see them: what they would save and cost.

Role: `rlfuse plan --search --hypothetical` searches their axes, too, and says so wherever it names one; no job file has
them. Pure. A configuration with them is a `HypotheticalConfig`; `memory` and `costs` of any other are the plain ones.

Experts: attention and experts are mapped apart, TP*CP*DP = ETP*EP*EDP (MoE Parallel Folding, arXiv 2504.14960): a rank
holds 1/EP of the experts, and each token goes to its experts' ranks and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from rlfuse.config.schema import Config
from rlfuse.fusion.costs import Costs
from rlfuse.planning.costs import STAYS, costs_of
from rlfuse.planning.hardware import Hardware
from rlfuse.planning.memory import ITEM, Budget, Memory, Moved, Part, memory_of
from rlfuse.planning.model_sizes import Shape
from rlfuse.planning.residency import Item

GROUP = "hypothetical"
OF_RANKS = frozenset({Item.PARAMETERS, Item.REFERENCE, Item.OPTIMIZER, Item.GRADIENTS, Item.ACTIVATIONS})


@dataclass(frozen=True)
class Hypothetical:
    """What can't be run yet; with the defaults, nothing of it."""

    expert_parallel_size: int = 1
    """Trainer ranks that share the experts of a mixture."""


NOTHING = Hypothetical()


@dataclass
class HypotheticalConfig(Config):
    """A job with them."""

    hypothetical: Hypothetical = field(default_factory=Hypothetical)


def hypothetical(config: Config) -> HypotheticalConfig:
    """The job, ready to be given other values of these keys."""
    return HypotheticalConfig(**{entry.name: getattr(config, entry.name) for entry in fields(Config)})


def of(config: Config) -> Hypothetical:
    """What the job has of it."""
    return getattr(config, GROUP, NOTHING)


def words(config: Config) -> list[str]:
    """What of it differs from nothing, as `key=value`."""
    given = ((entry.name, getattr(of(config), entry.name), entry.default) for entry in fields(Hypothetical))
    return [f"{name}={str(value).lower()}" for name, value, default in given if value != default]


def axes(config: Config, shape: Shape) -> dict[str, tuple[object, ...]]:
    """Key -> its values, what can be run first."""
    experts = shape.experts
    return {
        f"{GROUP}.expert_parallel_size": tuple(n for n in (1, 2, 4, 8, 16) if n == 1 or (experts and not experts % n)),
    }


def problems(config: Config, shape: Shape) -> Iterator[str]:
    """What speaks against the degrees: both mappings cover a stage's ranks."""
    expert, stages = of(config).expert_parallel_size, config.training.pipeline_parallel_size
    if wrong := mapping_problem(config.slots // stages, expert, shape.experts):
        yield f"{GROUP}.expert_parallel_size={expert}: {wrong}"


def mapping_problem(ranks: int, expert: int, experts: int, expert_tensor: int = 1) -> str:
    """Why `expert` times `expert_tensor` parallel experts can't lie on a stage's `ranks`; nothing if they can.

    Of attention the same ranks are TP * CP * DP, of experts ETP * EP * EDP.
    """
    if expert > 1 and not experts:
        return "the model has no experts"
    if experts % expert:
        return f"needs a divisor of the model's {experts} experts"
    if ranks % (expert * expert_tensor):
        return f"times {expert_tensor} tensor-parallel shares of an expert, needs a divisor of a stage's {ranks} ranks"
    return ""


# Time ----------------------------------------------------------------------------------------------------------------


def costs(
    config: Config, shapes: Mapping[str, Shape], hardware: Hardware, context: float, moved: Moved = STAYS
) -> Costs:
    """As `costs_of`."""
    given, plain = of(config), costs_of(config, shapes, hardware, context, moved)
    if given == NOTHING:
        return plain
    sent = _sent_s(config, shapes["actor"], hardware)
    return replace(
        plain,
        score_tokens_per_s=1 / (1 / plain.score_tokens_per_s + sent),
        train_tokens_per_s=1 / (1 / plain.train_tokens_per_s + 2 * sent),
    )


def _sent_s(config: Config, shape: Shape, hardware: Hardware) -> float:
    """Of a token, forward: to its experts' ranks and back."""
    expert, links, item = of(config).expert_parallel_size, hardware.links, ITEM[config.model.dtype]
    hidden, width = len(shape.layers) * shape.hidden * item, config.rollout.tensor_model_parallel_size
    near = expert <= config.trainer.n_gpus_per_node
    rate = links.within_bytes_per_s if near else links.between_bytes_per_s
    return 2 * shape.experts_used * hidden * (expert - 1) / expert / rate / width


# Memory --------------------------------------------------------------------------------------------------------------


def memory(
    config: Config,
    shapes: Mapping[str, Shape],
    budget: Budget,
    served: Mapping[str, Shape],
    models: Sequence[Part] = (),
) -> Memory:
    """As `memory_of`."""
    given, plain = of(config), memory_of(config, shapes, budget, served, models)
    if given == NOTHING:
        return plain
    kept = [part for part in plain.parts if part.item not in OF_RANKS]
    mine = [_on_a_rank(config, shapes, part) for part in plain.parts if part.item in OF_RANKS]
    return replace(plain, parts=(*mine, *kept))


def _on_a_rank(config: Config, shapes: Mapping[str, Shape], part: Part) -> Part:
    """The part on a rank that holds a share of the experts."""
    given, zero, size = of(config), config.actor.zero_stage, part.size
    divided = {"parameters": 3, "gradients": 2, "optimizer": 1}  # from this stage of ZeRO on, experts or not
    if part.role in shapes and zero < divided.get(part.what, 0):
        size *= 1 - shapes[part.role].of_experts * (1 - 1 / given.expert_parallel_size)
    return replace(part, size=size)
