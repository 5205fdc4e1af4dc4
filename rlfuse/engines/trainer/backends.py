"""Registry of the trainer backends that `actor.strategy` selects; a backend is imported on first use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_memory import ModelMemory


@dataclass(frozen=True, slots=True)
class Backend:
    """Import paths of a backend, each `module:name`."""

    model: str
    """The `ShardedModel` class."""
    memory: str
    """The `ModelMemory` class; its module must not import the backend's libraries."""
    compile_operations: str | None = None
    """Coroutine function of (ranks, config, device): compiles and loads operations on all ranks before they join."""
    wait_patterns: tuple[str, ...] = ()
    """Regular expressions of stack frames in which a rank waits for other ranks, in addition to torch's."""


BACKENDS = {
    "deepspeed": Backend(
        "rlfuse.engines.deepspeed.deepspeed_model:DeepSpeedModel",
        "rlfuse.engines.deepspeed.memory:ZeroMemory",
        "rlfuse.engines.deepspeed.deepspeed_ops:load_on_all_ranks",
        ("/deepspeed/comm/", "/deepspeed/.* in wait$"),
    ),
    "fsdp2": Backend("rlfuse.engines.fsdp2.fsdp2_model:Fsdp2Model", "rlfuse.engines.fsdp2.memory:Fsdp2Memory"),
}


def import_object(name: str) -> Any:
    """Import and return the object with this dotted name of a `Backend`."""
    module, _, found = name.partition(":")
    return getattr(import_module(module), found)


def model_memory(config: Config) -> type[ModelMemory]:
    """Return the memory model of the configured backend."""
    return import_object(BACKENDS[config.actor.strategy].memory)


def compile_operations(config: Config) -> Callable[..., Awaitable[None]] | None:
    """Return the function that compiles operations on all ranks; None for a backend without any."""
    found = BACKENDS[config.actor.strategy].compile_operations
    return found and import_object(found)
