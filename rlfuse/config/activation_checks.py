"""Check whether activations can be offloaded to the host. Pure part of `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config

KEY = "model.enable_activation_offload"


def activation_problems(config: Config, facts: Facts) -> Iterator[str]:
    """One line per problem."""
    model, stages = config.model, config.training.pipeline_parallel_size
    width = config.training.tensor_model_parallel_size
    if not model.enable_activation_offload:
        return
    if stages > 1:
        yield (
            f"{KEY}=true: needs whole models on the ranks, and training.pipeline_parallel_size={stages} has stages, "
            "whose schedule says what they hold (training.activation_memory); set one of the two to its default"
        )
    if width > 1:
        yield (
            f"{KEY}=true: each rank decides which of its layers are run again, and training.tensor_model_parallel_size="
            f"{width} of them can run a layer only together; set one of the two to its default"
        )
    if facts.cuda is False and model.activation_host_mb:
        yield (
            f"model.activation_host_mb={model.activation_host_mb}: must be 0 or null on CPU hosts, where the device is "
            "the host; set model.activation_disk_mb"
        )
