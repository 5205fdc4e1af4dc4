"""Convert verl settings whose value differs in rlfuse, or that depend on other settings. Pure; called by `translate`.

A conversion receives the value and all settings of the command. It returns rlfuse settings, or the reason for none ("":
nothing to report). `DEFAULTS` has every key that affects training and whose default differs from verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Given = Mapping[str, Any]
Outcome = dict[str, Any] | str

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "actor.ppo_mini_batch_size": 256,
    "model.enable_gradient_checkpointing": True,
    "rollout.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
}
"""Defaults of verl, by rlfuse key, where those of rlfuse differ."""

OVERLONG = (
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
ROLLOUT_IS = ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_is")
REWARD = ("custom_reward_function", "reward.custom_reward_function")
NO_RESUME = "verl checkpoints can't be resumed in rlfuse"
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def per_rank(value: Any, given: Given) -> Outcome:
    """Convert sequences of all ranks to sequences per rank."""
    slots = given.get("trainer.nnodes", 1) * given.get("trainer.n_gpus_per_node", DEFAULTS["trainer.n_gpus_per_node"])
    return {"actor.ppo_micro_batch_size_per_gpu": max(1, value // slots)} if isinstance(value, int) else ""


def clip_range(value: Any, given: Given) -> Outcome:
    """Convert clip_ratio, which verl ignores in favour of clip_ratio_low and clip_ratio_high (0.2 unless set)."""
    sides = [f"actor_rollout_ref.actor.clip_ratio_{side}" for side in ("low", "high")]
    hidden = [name.rpartition(".")[2] for name in sides if given.get(name, 0.2) is not None]
    if value == 0.2 or not hidden:
        return {"actor.clip_ratio": value}
    return f"no effect in verl, which uses {' and '.join(hidden)} (0.2 unless set); set those"


def importance(value: Any, given: Given) -> Outcome:
    """Convert rollout_is, which enables the threshold in verl."""
    if value in (None, False, "null"):
        return ""
    if value not in (True, "token"):
        return f"rlfuse weights per token; algorithm.rollout_is_threshold enables it ({value} in verl)"
    thresholds = (given[f"{name}_threshold"] for name in ROLLOUT_IS if f"{name}_threshold" in given)
    return {"algorithm.rollout_is_threshold": next(thresholds, 2.0)}


def custom_reward(value: Any, given: Given) -> Outcome:
    """Convert file and function name to one entry."""
    group = next((group for group in REWARD if given.get(f"{group}.path")), None)
    if group is None:
        return ""
    path = f"{given[f'{group}.path']}:{given.get(f'{group}.name') or 'compute_score'}"
    start = f"{group}.reward_kwargs."
    kwargs = {name.removeprefix(start): option for name, option in given.items() if name.startswith(start)}
    return {"reward.functions": [{"path": path, "kwargs": kwargs} if kwargs else path]}


def reward_model(value: Any, given: Given) -> Outcome:
    """Convert the reward model, which a path enables in rlfuse and `enable` in verl."""
    on = given.get("reward_model.enable") or given.get("reward.reward_model.enable")
    paths = (given.get(name) for name in ("reward_model.model.path", "reward.reward_model.model_path"))
    path = next((path for path in paths if path), None)
    if path and not on:
        return "no effect in verl, because reward_model.enable is not true"
    return {"reward.model_path": path} if path else ""


def overlong(value: Any, given: Given) -> Outcome:
    """Convert the overlong buffer, which a length above 0 enables in rlfuse and `enable` in verl."""
    group = next(group for group in OVERLONG if f"{group}.enable" in given or f"{group}.len" in given)
    on = given.get(f"{group}.enable", False)
    return {"reward.overlong_buffer.len": given.get(f"{group}.len", 0) if on else 0}


def run_folder(value: Any, given: Given) -> Outcome:
    """Convert default_local_dir, the folder of one run in verl and of all runs in rlfuse."""
    names = [given.get("trainer.project_name"), given.get("trainer.experiment_name")]
    end = "/" + "/".join(map(str, names))
    if isinstance(value, str) and value.rstrip("/").endswith(end):
        return {"trainer.default_local_dir": value.rstrip("/").removesuffix(end)}
    return (
        "the folder of one run in verl; in rlfuse runs are in trainer.default_local_dir/PROJECT/EXPERIMENT"
        if value
        else ""
    )


def greedy(value: Any, given: Given) -> Outcome:
    """Convert val_kwargs.do_sample."""
    return {"rollout.val_kwargs.temperature": 0.0} if value is False else ""


def validation_temperature(value: Any, given: Given) -> Outcome:
    """Convert the validation temperature, which has no effect in verl if do_sample is false."""
    return "" if given.get(f"{VALIDATION}.do_sample") is False else {"rollout.val_kwargs.temperature": value}


def loggers(value: Any, given: Given) -> Outcome:
    """Keep the loggers that rlfuse supports."""
    names = [value] if isinstance(value, str) else list(value or [])
    return {"trainer.logger": [name for name in names if name in ("console", "wandb", "tensorboard")]}


def resumed(value: Any, given: Given) -> Outcome:
    """Convert resume_mode; auto and disable have the same meaning."""
    return {"trainer.resume_mode": value} if value in ("auto", "disable") else NO_RESUME


def ignored(value: Any, given: Given) -> Outcome:
    """Ignore a setting that another conversion reads, or that verl overrides."""
    return ""


def renamed(key: str, off: Any = None, to: Any = None) -> Callable[[Any, Given], Outcome]:
    """Return a conversion that sets `key` to the value, or to `to`; it sets nothing for None and `off`."""
    return lambda value, _: "" if value in (None, off) else {key: value if to is None else to}


OPTIMIZED = {"actor_rollout_ref.actor": "actor", "critic": "critic"}
"""Groups of verl with an optimizer -> those of rlfuse."""
_ULYSSES = renamed("training.ulysses_sequence_parallel_size", off=1)
CONVERSIONS: dict[str, Callable[[Any, Given], Outcome]] = {
    "actor_rollout_ref.actor.ppo_micro_batch_size": per_rank,
    "actor_rollout_ref.actor.clip_ratio": clip_range,
    **{f"{group}.optim.total_training_steps": ignored for group in OPTIMIZED},
    **{f"{group}.optim.warmup_style": renamed(f"{ours}.optim.lr_scheduler_type") for group, ours in OPTIMIZED.items()},
    **{f"{group}.optim.min_lr_ratio": renamed(f"{ours}.optim.min_lr_ratio") for group, ours in OPTIMIZED.items()},
    **dict.fromkeys(ROLLOUT_IS, importance),
    "algorithm.rollout_correction.rollout_is_threshold": ignored,
    "algorithm.rollout_correction.bypass_mode": renamed("algorithm.old_log_probs", off=False, to="engine"),
    **{f"{group}.{leaf}": custom_reward for group in REWARD for leaf in ("path", "name")},
    **dict.fromkeys(("reward_model.enable", "reward_model.model.path"), reward_model),
    **dict.fromkeys(("reward.reward_model.enable", "reward.reward_model.model_path"), reward_model),
    **{f"{group}.{leaf}": overlong for group in OVERLONG for leaf in ("enable", "len")},
    "trainer.default_local_dir": run_folder,
    "trainer.logger": loggers,
    "trainer.resume_mode": resumed,
    "trainer.resume_from_path": lambda value, _: NO_RESUME if value else "",
    "actor_rollout_ref.rollout.name": lambda value, _: {"rollout.name": "transformers" if value == "hf" else value},
    "actor_rollout_ref.rollout.do_sample": lambda value, _: (
        "" if value else "training requires sampled responses; rollout.temperature must be above 0"
    ),
    f"{VALIDATION}.do_sample": greedy,
    f"{VALIDATION}.temperature": validation_temperature,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _ULYSSES,
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": _ULYSSES,
    "actor_rollout_ref.actor.fsdp_config.full_determinism": renamed("trainer.deterministic", off=False),
    "reward_model.rollout.name": renamed("reward.model_backend"),
    "reward.reward_model.rollout.name": renamed("reward.model_backend"),
}
