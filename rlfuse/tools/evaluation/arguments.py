"""Compose the job of an evaluation with the evaluated model as model.path. Keys for training only are not checked."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.custom_functions import FAMILY, METRICS, absolute, map_functions
from rlfuse.config.documentation import keys
from rlfuse.config.schema import Config
from rlfuse.config.secrets import hidden
from rlfuse.config.trainer import TrainerConfig
from rlfuse.errors import ConfigError
from rlfuse.run.resume.acceptance import with_run_name
from rlfuse.tools.evaluation.source import Source, find
from rlfuse.tools.run_code import add_option, model_code, refuse_code, reward_code

REWARD = ("reward.functions", "reward.model_path")
_CUSTOM = (f"{key.name}=" for key in keys() if key.custom and key.name != FAMILY)
TRAINING_PROBLEMS = ("data.train_files: `", "ref.path=", f"{METRICS}:", *_CUSTOM)
"""Prefixes of config problems that do not affect an evaluation: train_files is val_files, and the reference and custom
functions that only training uses."""
EVALUATION_KEYS = ("rollout.val_kwargs.", "data.val_files=")
"""Prefixes of settings that may differ from those of the run."""
REWARD_KEYS = (
    "functions",
    "weights",
    "model_path",
    "model_head",
    "model_head_kwargs",
    "model_dtype",
    "overlong_buffer",
)
VIDEO_KEYS = ("sampling", "max_tokens", "levels", "fps_general", "fps_detail", "fps_motion", "task", "frames")
VIDEO_KEYS += ("tokens_per_frame", "timestamps", "max_image_tokens", "mm_processor_kwargs")


def make_parser(name: str, usage: str, **more: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command that takes a job; callers may add options."""
    made = argparse.ArgumentParser(prog=f"rlfuse {name}", usage=f"rlfuse {name} {usage}", allow_abbrev=False, **more)
    made.add_argument("--config-dir", metavar="NAME", help="same as for rlfuse train")
    made.add_argument("--config-name", metavar="NAME", help="same as for rlfuse train")
    add_option(made)
    return made


def parse_arguments(made: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (options, remaining words for `read`)."""
    arguments, words = made.parse_known_args(argv)
    if unknown := [word for word in words if word.startswith("-")]:
        made.error(f"unrecognized option: {unknown[0]}")
    given = {"--config-dir": arguments.config_dir, "--config-name": arguments.config_name}
    return arguments, [*(f"{option}={value}" for option, value in given.items() if value is not None), *words]


def read(
    words: Sequence[str], files: Sequence[str] = (), scored: bool = True, run_code: bool = False
) -> tuple[Config, Source]:
    """Return the checked config of `my_job.yaml [CHECKPOINT] key=value ...`, and the model to evaluate.

    `files`: prompt files that replace data.val_files. `scored`: whether rewards are computed. Without a job file, the
    config.yaml of the checkpoint's run is used; code that it names requires `run_code`.
    """
    given, settings = split_checkpoint(words)
    folder = run_config_of(given) if given is not None and not any(is_job_argument(word) for word in settings) else []
    job = compose_job([*folder, *settings], with_modules=not folder)  # nothing in a run folder is trusted
    if folder:
        content = OmegaConf.to_container(job)
        code = model_code(content) + (reward_code(content) if scored else [])
        words = {word.partition("=")[0].lstrip("+") for word in settings}
        refuse_code(Path(folder[0]), [each for each in code if each.partition("=")[0] not in words], run_code)
    settings = [*folder, *settings]
    source = find(given, run_of(settings, job), job.model.path if not OmegaConf.is_missing(job.model, "path") else "")
    if not source.answers:
        raise ConfigError(
            [f"CHECKPOINT {source.path}: it is a reward model, which generates no responses; use a policy"]
        )
    if job.trainer.task == "reward_model":
        raise ConfigError(
            ["trainer.task=reward_model: reward models are evaluated during training; use the job of a policy"]
        )
    if job.trainer.task != TrainerConfig.task:  # a policy of sft or dpo answers prompts as any other
        job.trainer.task, job.actor.ppo_mini_batch_size = TrainerConfig.task, job.data.train_batch_size
    job.model.path = source.path
    job.critic.path = job.ref.path = None
    if files:
        job.data.val_files = list(files)
    if not job.data.val_files:
        raise ConfigError(["data.val_files=[]: there are no prompts; set it to held-out data"])
    job.data.train_files = job.data.val_files
    return map_functions(_check(job, scored), absolute), source


def _check(job: DictConfig, scored: bool) -> Config:
    ignored = TRAINING_PROBLEMS if scored else TRAINING_PROBLEMS + REWARD
    try:
        return to_config(job)
    except ConfigError as error:
        if left := [line for line in error.problems if not line.startswith(ignored)]:
            raise ConfigError(left) from None
    return OmegaConf.to_object(job)


def made_from(config: Config, source: Source, scored: bool) -> dict[str, Any]:
    """Return the settings that determine the responses and their scores."""
    data, rollout, reward = config.data, config.rollout, dataclasses.asdict(config.reward)
    return hidden(
        {
            "model": source.path,
            "dtype": config.model.dtype,
            "video_family": config.model.video_family,
            "step": source.step,
            "files": list(data.val_files),
            "media_root": data.media_root,
            "prompt_key": data.prompt_key,
            "prompt_is_chat": data.prompt_is_chat,
            "apply_chat_template_kwargs": dict(data.apply_chat_template_kwargs),
            "max_prompt_length": data.max_prompt_length,
            "max_response_length": data.max_response_length,
            "seed": data.seed,
            "stop": list(rollout.stop),
            **dataclasses.asdict(rollout.val_kwargs),
            "video": {name: getattr(config.video, name) for name in VIDEO_KEYS},
            "reward": {name: reward[name] for name in REWARD_KEYS} if scored else None,
        }
    )


def split_checkpoint(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return (word that names a model or None, other words). Folder names may contain `=`, as in sweeps."""
    found = [word for word in words if _is_model(word)]
    if len(found) > 1:
        raise ConfigError([f"{' '.join(found)}: only one CHECKPOINT is allowed"])
    return (found[0] if found else None), [word for word in words if word not in found]


def _is_model(word: str) -> bool:
    return (
        not word.startswith("-")
        and not word.endswith((".yaml", ".yml"))
        and not (word.startswith("~") and "/" not in word)  # `~key`
        and ("=" not in word or os.path.isdir(os.path.expanduser(word)))
    )


def is_job_argument(word: str) -> bool:
    """Return whether a word selects the job."""
    return word.endswith((".yaml", ".yml")) or word.startswith(("experiment=", "--config-name="))


def run_config_of(given: str) -> list[str]:
    """Return [path] of the `config.yaml` of the run that contains the folder, or []."""
    folder = Path(os.path.expanduser(given)).absolute()
    files = (each / "config.yaml" for each in (folder, *folder.parents[:3]))
    return [str(path) for path in files if path.is_file()][:1]


def run_of(settings: Sequence[str], job: DictConfig) -> Path | None:
    """Return the run folder of the job; for a job without a name, its last run with these settings, or None."""
    if job.trainer.experiment_name is None:
        words = [word for word in settings if not word.lstrip("+").startswith(EVALUATION_KEYS)]
        trained = compose_job(words, with_modules=False)
        if OmegaConf.missing_keys(trained):
            return None
        return with_run_name(OmegaConf.to_object(trained)).run_folder
    trainer = job.trainer
    return (Path(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name).absolute()
