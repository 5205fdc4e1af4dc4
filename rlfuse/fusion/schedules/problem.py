"""The scheduling problem: the pipelines of one or more models on one row of devices, for one optimizer step.

Pipeline p of a model with S stages is on devices p*S .. p*S+S-1, stage 0 first when its direction is `down`, last when
it is `up`; chunk-stages are placed by `operations.place_of`. Times share one unit, and so do activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlfuse.config.input_files import InputError
from rlfuse.fusion.schedules.operations import Kind, place_of


class ScheduleError(InputError):
    """A problem or a schedule that can't be used as it stands. The message is for the person who wrote it."""


Times = float | tuple[float, ...]
"""One number for all stages, or one for each, or for each chunk-stage."""
PER_STAGE = "forward", "backward", "activation"


@dataclass(frozen=True, slots=True)
class Model:
    """One model that trains or scores: its pipelines, and what a micro-batch costs on each stage."""

    name: str
    stages: int
    micro_batches: int
    """Of each pipeline."""
    forward: Times
    backward: Times | None
    """Whole: gradients of inputs and of weights. None: it only scores, which keeps no activation."""
    pipelines: int = 1
    activation: Times = 1.0
    """What a micro-batch keeps from the start of its forward to the end of its backward (of `W` where split)."""
    direction: Literal["down", "up"] = "down"
    weight_gradient: float = 0.5
    """W's share of `backward` where the backward pass is split."""
    chunks_per_device: int | None = None
    """None: the problem's."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Models that share devices. Raises ScheduleError where fields don't go together."""

    devices: int
    models: tuple[Model, ...]
    split_backward: bool = False
    memory_cap: float | None = None
    """Of every device, relative to the worst device of serial 1F1B. None: no cap."""
    memory_per_device: float | None = None
    """The same in the unit of `activation`; where both are given, both hold."""
    communication: float = 0.0
    """From the end of an operation to the start of the one that needs its result, on another device."""
    chunks_per_device: int = 1
    placement: str = "v"
    """Of chunks: there and back, or round and round."""
    rates: tuple[float, ...] = ()
    """Of each device: how many times longer than stated everything takes there. None: 1 each."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ScheduleError(*problems)

    def _problems(self) -> Iterator[str]:
        if not self.models:
            yield "models=[]: a schedule is for at least one model"
        if self.rates and len(self.rates) != self.devices:
            yield f"rates has {len(self.rates)} values for devices={self.devices}: give one each, or none"
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            yield f"models: names {names} must differ"
        for i, model in enumerate(self.models):
            where = f"models[{i}]"
            if model.pipelines * model.stages != self.devices:
                yield (
                    f"{where}: pipelines={model.pipelines} of stages={model.stages} stand on "
                    f"{model.pipelines * model.stages} devices, but devices={self.devices}; every model covers all "
                    "devices: make pipelines * stages = devices"
                )
            for field in PER_STAGE:
                value = getattr(model, field)
                if isinstance(value, tuple) and len(value) not in (model.stages, self.stages(model)):
                    count = f"{len(value)} values for stages={model.stages}"
                    chunks = f" (of {self.stages(model)} chunks)" * (self.chunks(model) > 1)
                    yield f"{where}.{field} has {count}: give one each{chunks}, or a number"

    def model(self, name: str) -> Model:
        for model in self.models:
            if model.name == name:
                return model
        raise ScheduleError(f"model {name!r}: the problem has {', '.join(model.name for model in self.models)}")

    def chunks(self, model: Model) -> int:
        return model.chunks_per_device or self.chunks_per_device

    def stages(self, model: Model) -> int:
        """Stages of one of its pipelines, or chunk-stages where devices hold several."""
        return model.stages * self.chunks(model)

    def device(self, model: Model, pipeline: int, stage: int) -> int:
        place = self._place(model, stage)
        return pipeline * model.stages + (place if model.direction == "down" else model.stages - 1 - place)

    def duration(self, model: Model, pipeline: int, stage: int, kind: Kind) -> float:
        """Of an operation, on the device where it stands."""
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
        """What a micro-batch needs on every stage, in this order."""
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
        """The same of all chunks of each device together, as a model has it."""
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
        """Peak activation of serial 1F1B's worst device: stage s of S holds min(S - s, M) micro-batches. 1 where
        nothing is kept."""
        whole = self.variant(split_backward=False, chunks_per_device=1)
        held = (
            min(model.stages - stage, model.micro_batches) * whole.activation(model, stage)
            for model in whole.models
            for stage in range(model.stages)
        )
        return max(held, default=0.0) or 1.0

    @property
    def memory_limit(self) -> float:
        """What a device may hold, in the unit of `activation`; infinite without a cap."""
        relative = float("inf") if self.memory_cap is None else self.memory_cap * self.memory_unit
        absolute = float("inf") if self.memory_per_device is None else self.memory_per_device
        return min(relative, absolute)

    def only(self, model: Model) -> Problem:
        """The same with one of its models alone, under the same absolute memory limit."""
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
            self,
            models=models,
            split_backward=split_backward,
            chunks_per_device=chunks_per_device,
            placement=placement,
        )
