"""Which settings keep a trainer's passes from being recorded as CUDA graphs.

Role: one of the checks that `checks.check` goes through; the memory plan and trainer ranks read `graph_blocker`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.facts import Facts
from rlfuse.config.problems import problem, value_of
from rlfuse.config.schema import Config

KEY = "actor.cuda_graphs"
BLOCKERS = {
    "training.pipeline_parallel_size": (lambda value: value > 1, "stages send activations within a pass"),
    "training.tensor_model_parallel_size": (lambda value: value > 1, "layers wait for other ranks"),
    "training.ulysses_sequence_parallel_size": (lambda value: value > 1, "attention waits for other ranks"),
    "actor.zero_stage": (lambda value: value > 1, "ranks exchange gradients (2) and weights (3) during passes"),
    "model.enable_activation_offload": (bool, "activations move to the host during a pass"),
    "model.use_remove_padding": (lambda value: not value, "only packed batches have few sizes"),
}
"""Key -> (whether a value rules graphs out, why)."""


def graph_blocker(config: Config) -> str | None:
    """Return the first setting that rules graphs out as `KEY=VALUE: why`, or None."""
    found = ((name, value_of(config, name), rule) for name, rule in BLOCKERS.items())
    return next((f"{name}={value}: {why}" for name, value, (blocks, why) in found if blocks(value)), None)


def graph_problems(config: Config, facts: Facts) -> Iterator[str]:
    """One line per problem."""
    if config.actor.cuda_graphs != "on":
        return
    if facts.cuda is False:
        yield problem(config, KEY, "needs GPUs", "set auto")
    elif blocker := graph_blocker(config):
        yield problem(config, KEY, f"not possible with {blocker}", "set auto, or that key to its default")
