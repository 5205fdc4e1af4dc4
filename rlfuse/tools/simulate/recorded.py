"""Turn a run folder into workloads: the recorded lengths of each step, with costs fitted to its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlfuse.config.input_files import WorkloadError
from rlfuse.config.schema import Config
from rlfuse.config.trainer import TrainerConfig
from rlfuse.costs.fit import Fit, fit
from rlfuse.costs.model import Costs
from rlfuse.costs.rates import slot_rates
from rlfuse.costs.spans import spans_within
from rlfuse.events import Span, read_events
from rlfuse.parsing import parse_yaml
from rlfuse.simulate.job_step import finished_lengths, workload_of
from rlfuse.simulate.workload import Workload


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded step."""

    number: int
    start: float
    seconds: float
    workload: Workload
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run: its steps, the costs fitted to them, and its fusion policy."""

    policy: str
    fit: Fit
    steps: list[Step]
    rates: tuple[float, ...] = ()  # relative time of each slot; empty if none is slow
    use_measured_rates: bool = True  # False with trainer.deterministic


def read_run(folder: Path) -> Recording:
    """Read a run. Raises WorkloadError if the folder has no usable run, RunError for damaged events."""
    config, spans = read_generating_config(folder), read_events(folder / "events.jsonl")
    fitted, rates = fit_run(config, spans)
    if "decoding" not in fitted.accuracy:
        raise WorkloadError(
            f"{folder / 'events.jsonl'}: no `decode` spans of engines to fit costs to; record a run with this version"
        )
    steps = [
        Step(span.step, span.start, span.seconds, recorded_workload(config, fitted.costs, rates, inside), inside)
        for span in spans
        if span.kind == "step" and (inside := spans_within(spans, span))
    ]
    if not steps:
        raise WorkloadError(f"{folder / 'events.jsonl'}: no complete step; let the run finish one")
    return Recording(config.fusion.policy, fitted, steps, rates, not config.trainer.deterministic)


def fit_run(config: Config, spans: Sequence[Span]) -> tuple[Fit, tuple[float, ...]]:
    """Return the costs of a typical slot, and the relative time of each slot (empty if none is slow)."""
    before = Costs(max_sequences=config.rollout.max_num_seqs, max_tokens=config.data.max_response_length)
    width, in_lockstep = config.rollout.tensor_model_parallel_size, config.lockstep or config.lockstep_backward
    rates = slot_rates(spans, config.slots // width, width, in_lockstep)
    return fit(spans, before, rates, width), rates


def recorded_workload(config: Config, costs: Costs, rates: Sequence[float], step: Sequence[Span]) -> Workload:
    """Return the workload of a recorded step, with the speed of each slot."""
    engines = config.slots // config.rollout.tensor_model_parallel_size
    found = workload_of(config, costs, engines, *finished_lengths(step))
    return replace(found, slot_speed=tuple(1 / rate for rate in rates))


def config_of(path: Path) -> Config:
    """Return the configuration of a run without `reward`, whose secrets may be missing here. Raises WorkloadError."""
    try:
        written = parse_yaml(path.read_text(), OmegaConf.create)
        if isinstance(written, DictConfig):
            written.pop("reward", None)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), written))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}; give the folder of a run, as printed at its end") from error
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {error}; it may have been written by another version") from error
    assert isinstance(config, Config)
    return config


def read_generating_config(folder: Path) -> Config:
    """Return the configuration of a run. Raises WorkloadError if it is invalid or of an offline task."""
    config = config_of(folder / "config.yaml")
    if config.trainer.is_offline:
        raise WorkloadError(
            f"{folder}: run of an offline task (trainer.task={config.trainer.task}), which has no decoding and scoring "
            f"to fit costs to; give the folder of a run with trainer.task={TrainerConfig.task}"
        )
    return config
