"""The trainer backends that `actor.strategy` selects, by name: none of them is imported before it is used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rlfuse.config.schema import Config
from rlfuse.engines.memory.model_memory import ModelMemory


@dataclass(frozen=True, slots=True)
class Backend:
    """Dotted names, as `module:name`."""

    model: str
    """A `ShardedModel`."""
    memory: str
    """A `ModelMemory`, whose module imports no library of the backend."""
    compile_operations: str | None = None
    """A coroutine function of (ranks, config, device) that has ranks compile and load operations before they meet."""
    wait_patterns: tuple[str, ...] = ()
    """Regular expressions of stack frames in which a rank waits for others, besides torch's."""


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
