"""The scheduling problem: pipelines of one or more models on the same devices, for one optimizer step.

Pipeline p of a model with S stages uses devices p*S .. p*S+S-1, with stage 0 first if its direction is `down` and last
if it is `up`; chunk-stages are placed by `operations.place_of`. All times share one unit, and so do all activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlfuse.config.input_files import InputError
from rlfuse.fusion.schedules.operations import Kind, place_of


class ScheduleError(InputError):
    """Raised for an invalid problem or schedule, with a message for its author."""


Times = float | tuple[float, ...]
"""One number for all stages, or one per stage or chunk-stage."""
PER_STAGE = "forward", "backward", "activation"


@dataclass(frozen=True, slots=True)
class Model:
    """One model that trains or scores: its pipelines and the cost of a micro-batch per stage."""

    name: str
    stages: int
    micro_batches: int
    """Number per pipeline."""
    forward: Times
    backward: Times | None
    """Time for the gradients of inputs and weights. None: a score-only model, which keeps no activations."""
    pipelines: int = 1
    activation: Times = 1.0
    """Memory of a micro-batch from the start of its forward to the end of its backward (of `W` if split)."""
    direction: Literal["down", "up"] = "down"
    weight_gradient: float = 0.5
    """Fraction of `backward` spent in W if the backward pass is split."""
    chunks_per_device: int | None = None
    """None: as the problem."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Models that share devices. Raises ScheduleError for inconsistent fields."""

    devices: int
    models: tuple[Model, ...]
    split_backward: bool = False
    memory_cap: float | None = None
    """Memory limit of each device relative to the peak of serial 1F1B. None: no limit."""
    memory_per_device: float | None = None
    """Memory limit of each device in the unit of `activation`. If both limits are given, both apply."""
    communication: float = 0.0
    """Delay from the end of an operation to the start of a dependent one on another device."""
    chunks_per_device: int = 1
    placement: str = "v"
    """Placement of chunks: `v` or `interleaved`."""
    rates: tuple[float, ...] = ()
    """Factor on all durations per device. Empty: 1 each."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ScheduleError(*problems)

    def _problems(self) -> Iterator[str]:
        if not self.models:
            yield "models=[]: at least one model is required"
        if self.rates and len(self.rates) != self.devices:
            yield f"rates has {len(self.rates)} values for devices={self.devices}: give one per device, or none"
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            yield f"models: names {names} must differ"
        for i, model in enumerate(self.models):
            where = f"models[{i}]"
            if model.pipelines * model.stages != self.devices:
                yield (
                    f"{where}: pipelines={model.pipelines} with stages={model.stages} use "
                    f"{model.pipelines * model.stages} devices, but devices={self.devices}. Every model must use all "
                    "devices: set pipelines * stages = devices"
                )
            for field in PER_STAGE:
                value = getattr(model, field)
                if isinstance(value, tuple) and len(value) not in (model.stages, self.stages(model)):
                    count = f"{len(value)} values for stages={model.stages}"
                    chunks = f" (of {self.stages(model)} chunks)" * (self.chunks(model) > 1)
                    yield f"{where}.{field} has {count}: give one per stage{chunks}, or a number"

    def model(self, name: str) -> Model:
        for model in self.models:
            if model.name == name:
                return model
        raise ScheduleError(
            f"model {name!r} is not in the problem; models: {', '.join(model.name for model in self.models)}"
        )

    def chunks(self, model: Model) -> int:
        return model.chunks_per_device or self.chunks_per_device

    def stages(self, model: Model) -> int:
        """Return the number of stages of a pipeline, or of chunk-stages if devices hold several chunks."""
        return model.stages * self.chunks(model)

    def device(self, model: Model, pipeline: int, stage: int) -> int:
        place = self._place(model, stage)
        return pipeline * model.stages + (place if model.direction == "down" else model.stages - 1 - place)

    def duration(self, model: Model, pipeline: int, stage: int, kind: Kind) -> float:
        """Return the duration of an operation on its device."""
        backward = kind != "F"
        whole = self._of(model, "backward" if backward else "forward", stage)
        whole *= self.rates[self.device(model, pipeline, stage)] if self.rates else 1.0
        if not backward or not self.split_backward:
            return whole
        return whole * (model.weight_gradient if kind == "W" else 1 - model.weight_gradient)

    def activation(self, model: Model, stage: int) -> float:
        if model.backward is None:
            return 0.0
        return self._of(model, "activation", stage)

    def kinds(self, model: Model) -> tuple[Kind, ...]:
        """Return the kinds of operations of a micro-batch on every stage, in order."""
        if model.backward is None:
            return ("F",)
        return ("F", "B", "W") if self.split_backward else ("F", "B")

    def _place(self, model: Model, stage: int) -> int:
        return place_of(stage, model.stages, self.placement)

    def _of(self, model: Model, field: str, stage: int) -> float:
        value = getattr(model, field)
        if isinstance(value, tuple) and len(value) == self.stages(model):
            return value[stage]
        return (value[self._place(model, stage)] if isinstance(value, tuple) else value) / self.chunks(model)

    def _whole(self, model: Model, field: str) -> Any:
        """Return the sums over the chunks of each device of a per-stage field."""
        value = getattr(model, field)
        if not isinstance(value, tuple) or len(value) == model.stages:
            return value
        sums = [0.0] * model.stages
        for stage, each in enumerate(value):
            sums[self._place(model, stage)] += each
        return tuple(sums)

    @property
    def operations(self) -> int:
        return sum(
            model.pipelines * self.stages(model) * model.micro_batches * len(self.kinds(model)) for model in self.models
        )

    @property
    def memory_unit(self) -> float:
        """Return the peak activation memory of serial 1F1B, whose stage s of S holds min(S - s, M) micro-batches.

        1 if no model keeps activations.
        """
        whole = self.variant(split_backward=False, chunks_per_device=1)
        held = (
            min(model.stages - stage, model.micro_batches) * whole.activation(model, stage)
            for model in whole.models
            for stage in range(model.stages)
        )
        return max(held, default=0.0) or 1.0

    @property
    def memory_limit(self) -> float:
        """Return the memory limit of a device in the unit of `activation`; infinity without a limit."""
        relative = float("inf") if self.memory_cap is None else self.memory_cap * self.memory_unit
        absolute = float("inf") if self.memory_per_device is None else self.memory_per_device
        return min(relative, absolute)

    def only(self, model: Model) -> Problem:
        """Return the problem with only one of its models, under the same absolute memory limit."""
        limit = self.memory_limit
        return replace(
            self, models=(model,), memory_cap=None, memory_per_device=None if limit == float("inf") else limit
        )

    def variant(self, *, split_backward: bool, chunks_per_device: int, placement: str = "v") -> Problem:
        whole = ({field: self._whole(model, field) for field in PER_STAGE} for model in self.models)
        models = tuple(
            replace(model, chunks_per_device=None, **fields) for model, fields in zip(self.models, whole, strict=True)
        )
        return replace(
            self, models=models, split_backward=split_backward, chunks_per_device=chunks_per_device, placement=placement
        )
