"""Complete a job file for planning, and write the job file of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.checks import value_of
from rlfuse.config.documentation import keys
from rlfuse.config.facts import missing_for_run
from rlfuse.config.prepared import command_for
from rlfuse.config.schema import Config
from rlfuse.files import write_whole
from rlfuse.progress import Console

STAND_INS = {
    "data.train_files": ["train.parquet"],
    "reward.functions": ["rlfuse.rewards.verifiers.exact:score"],
}
"""What a job file has where the job does not say, to be replaced."""


def completed(given: DictConfig) -> DictConfig:
    """With something where a job needs what no plan does."""
    for key, value in STAND_INS.items():
        if not OmegaConf.select(given, key) and not (key.startswith("reward.") and given.reward.model_path):
            OmegaConf.update(given, key, value)
    return given


def plannable(given: DictConfig) -> DictConfig:
    """Return a copy without the arguments of reward functions that only the run's machine can resolve (secrets)."""
    job = deepcopy(given)
    for entry in job.reward.functions:
        if isinstance(entry, DictConfig) and isinstance(entry.get("kwargs"), DictConfig):
            for name in [name for name in entry.kwargs if not _resolves(entry.kwargs, name)]:
                with open_dict(entry.kwargs):
                    del entry.kwargs[name]
    return job


def _resolves(kwargs: DictConfig, name: str) -> bool:
    try:
        OmegaConf.resolve(OmegaConf.create({name: kwargs[name]}))
    except OmegaConfBaseException:
        return False
    return True


def unset(config: Config) -> list[str]:
    """Return the keys that the job leaves to be set before a run."""
    return [key for key, value in STAND_INS.items() if value_of(config, key) == value]


def needed_by_run(config: Config) -> Iterator[str]:
    """Yield a line for each kind of thing that the run needs and the plan did not."""
    if keys_ := unset(config):
        yield f"the run needs {', '.join(keys_)}, which the job does not set"
    stand_ins = {str(each) for key in unset(config) for each in STAND_INS[key]}
    if missing := [path for path in missing_for_run(config) if path not in stand_ins]:
        command = next(filter(None, map(command_for, missing)), None)
        yield f"the run will need {', '.join(missing)}, not found here" + (f": `{command}`" if command else "")


def beyond_limits(config: Config, prompt_tokens: float | None, response_tokens: float | None) -> Iterator[str]:
    """Mean lengths, as an option gave them, that the job's limits would cut."""
    for name, mean in (("prompt", prompt_tokens), ("response", response_tokens)):
        limit = getattr(config.data, f"max_{name}_length")
        if mean is not None and mean > limit:
            yield f"--{name}-tokens {mean:g}: needs at most data.max_{name}_length={limit}; raise that key with it"


def differing(given: DictConfig, settings: Mapping[str, object]) -> list[tuple[str, object]]:
    """What the plan changes in the job."""
    return [(key, value) for key, value in settings.items() if OmegaConf.select(given, key) != value]


def write_job(path: Path, given: DictConfig, settings: Mapping[str, object], planned: Config, console: Console) -> None:
    """Every key that differs from its default, as a job file: as the job writes it, be it by a reference."""
    written, as_given = OmegaConf.create(), OmegaConf.to_container(given)  # unresolved
    for key in keys():
        if key.required or value_of(planned, key.name) != key.default:
            OmegaConf.update(
                written,
                key.name,
                settings.get(key.name, reduce(getitem, key.name.split("."), as_given)),
                force_add=True,
            )
    read = OmegaConf.to_object(plannable(OmegaConf.merge(OmegaConf.structured(Config), written)))
    for key in keys():  # a reference to what the plan changes
        if value_of(read, key.name) != value_of(planned, key.name):
            OmegaConf.update(written, key.name, value_of(planned, key.name), force_add=True)
    open_keys = ", ".join(unset(planned))
    heading = "# Written by `rlfuse plan --search`.\n" + (f"# Put yours: {open_keys}.\n" if open_keys else "")
    write_whole(path, heading + OmegaConf.to_yaml(written))
    console.print(f"job file: {path}; `rlfuse plan {path}`, `rlfuse train {path}`", soft_wrap=True)
    if open_keys:
        console.print(f"  put yours into it: {open_keys}", soft_wrap=True)
