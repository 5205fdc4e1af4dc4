"""Translate settings of verl. Pure.

A conversion receives the value and all settings of the command. It returns rlfuse settings, or why there are none ("":
nothing to report). `DEFAULTS` has every key that affects training and whose default differs from verl's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.keys import is_free
from rlfuse.config.other_frameworks import Counterpart, counterpart
from rlfuse.tools.translate.arguments import Command
from rlfuse.tools.translate.job import Open, Translation, affects_training

Given = Mapping[str, Any]
Outcome = dict[str, Any] | str

PROGRAMS = re.compile(r"((^|verl\.trainer\.)main_ppo(_sync)?|(^|dapo\.|src\.)main_dapo|(^|entropy\.)main_entropy)$")
"""Ends of the names of verl's programs and recipes that train by the settings alone."""
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
CORRECTION = "algorithm.rollout_correction"
BYPASS = tuple(f"{CORRECTION}.{name}" for name in ("bypass_mode", "bypass_old_logprob_for_rollout"))
REWARD = ("custom_reward_function", "reward.custom_reward_function")
REWARD_KWARGS = tuple(f"{group}.reward_kwargs." for group in REWARD)
NO_RESUME = "verl checkpoints can't be resumed in rlfuse"
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"
LOGGERS = "trainer.logger"
LOSS_MODE, LOSS_AGG_MODE = (f"actor_rollout_ref.actor.{name}" for name in ("policy_loss.loss_mode", "loss_agg_mode"))
CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "entropy_trainer")
"""Config files of verl with the same defaults."""
SAME = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Estimators of verl -> the one with the same result."""
BY_SEQUENCE = ("gspo", "sapo")
"""Losses that verl aggregates by seq-mean-token-mean, whatever its loss_agg_mode."""
DIFFERENCES = {
    ("algorithm.adv_estimator", "gpg"): "verl divides by the number of non-zero scores",
    ("algorithm.adv_estimator", "gdpo"): "verl whitens over tokens",
    ("actor.loss_mode", "clip_cov"): "verl selects tokens in each micro-batch",
    ("actor.loss_mode", "kl_cov"): "verl selects tokens in each micro-batch",
    (f"{CORRECTION}.rollout_rs", None): "verl also removes rejected tokens from KL loss, entropy bonus and divisor",
}
"""(Key, value or None for all values) of methods that differ from those of verl (`jobs/coming_from.md`) -> how."""
ENGINES = re.compile(r"(sglang|vllm|trtllm)(_\w+)?")
GSM8K, MATH = "rlfuse.rewards.verifiers.numeric:score", "rlfuse.rewards.verifiers.math:score"
VERIFIERS = ((re.compile(r"gsm8k"), GSM8K, "*gsm8k*"), (re.compile(r"(^|/)math(/|\.)|MATH-lighteval"), MATH, "*MATH*"))
"""Name of a file of verl's examples -> verifier, and pattern of its data_source."""
WITHOUT_EFFECT = re.compile(
    r"\.checkpoint\.|^(reward\.)?reward_model\.|^reward_model|entropy_from_logits|entropy_checkpointing|max_inflight"
    r"|prometheus|profil|offload|num_workers|_workers$|disaggregation|fused_kernel|liger|tiled_mlp|attn_implementation"
    r"|_parallel_size$|logprobs_mode|scheduling_policy|skip_tokenizer_init|layered_summon|use_shm|image_patch_size"
    r"|audio_key|return_multi_modal|return_full_prompt|val_max_samples|zero_indexed_step|target_modules|lora_alpha"
    r"|\.lora\.(?!rank)|multi_turn\.(max|format|tool_response|tokeniz|use_inference|num_)|agent\.(num_workers|custom)"
    r"|data_loader_seed|\.total_training_steps|max_inflight|pf_ppo\.|^trainer\.(ray_|use_|wandb_|del_local|esi_)"
    r"|^hydra\.|^transfer_queue|^ray_|^global_|max_resp_len|\.log$|_impl$|prefix_grouper|calculate_entropy|use_rmpad"
)
"""Names of verl that do not change what is trained."""


def per_rank(value: Any, given: Given) -> Outcome:
    """Convert sequences of all ranks to sequences per rank."""
    if value is None:
        return ""
    names = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": DEFAULTS["trainer.n_gpus_per_node"]}
    factors = [value, *(given.get(name, default) for name, default in names.items())]
    if not all(isinstance(each, int) and each > 0 for each in factors):
        return {"actor.ppo_micro_batch_size_per_gpu": Open("is divided by the number of ranks, which is not known")}
    return {"actor.ppo_micro_batch_size_per_gpu": max(1, value // (factors[1] * factors[2]))}


def clip_range(value: Any, given: Given) -> Outcome:
    """Convert clip_ratio, which verl ignores in favour of clip_ratio_low and clip_ratio_high (0.2 unless set)."""
    sides = [f"actor_rollout_ref.actor.clip_ratio_{side}" for side in ("low", "high")]
    hidden = [name.rpartition(".")[2] for name in sides if given.get(name, 0.2) is not None]
    if value == 0.2 or not hidden:
        return {"actor.clip_ratio": value}
    return f"no effect in verl, which uses {' and '.join(hidden)} (0.2 unless set); set those"


def truncation(value: Any, given: Given) -> Outcome:
    """Convert tis_imp_ratio_cap, the threshold of truncated importance weights per token; -1 disables them."""
    if isinstance(value, int | float) and value <= 0:
        return ""
    on = value is not None
    return {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": value} if on else ""


def bounds(key: str) -> Callable[[Any, Given], Outcome]:
    """Return a conversion of a threshold, which in verl may be text with a lower and an upper bound, as `0.5_2.0`."""

    def convert(value: Any, given: Given) -> Outcome:
        lower, _, upper = str(value).rpartition("_")
        try:
            found = {key: value if value is None else float(upper)}
            return found | ({f"{key}_lower": float(lower)} if lower else {})
        except ValueError:
            return {key: Open(f"rlfuse has one bound, or a lower and an upper one: {key} and {key}_lower")}

    return convert


def custom_reward(value: Any, given: Given) -> Outcome:
    """Convert file and function name to one entry."""
    group = next((group for group in REWARD if given.get(f"{group}.path")), None)
    if group is None:
        return ""
    file = str(given[f"{group}.path"]).removeprefix("pkg://")
    path = f"{file}:{given.get(f'{group}.name') or 'compute_score'}"
    start = f"{group}.reward_kwargs"
    kwargs = {name.removeprefix(f"{start}."): each for name, each in given.items() if name.startswith(f"{start}.")}
    kwargs = {**(given.get(start) or {}), **kwargs}
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


def generated_batch(value: Any, given: Given) -> Outcome:
    """Convert gen_batch_size, which is also the number of prompts that are trained on unless groups are filtered."""
    trained = given.get("data.train_batch_size", DEFAULTS["data.train_batch_size"])
    if value in (None, trained) or given.get("algorithm.filter_groups.enable"):
        return "the number of prompts per step is data.train_batch_size"
    return {"data.train_batch_size": Open(f"verl trains on these prompts, not on train_batch_size={trained}")}


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
    names = value if isinstance(value, list) else [str(value)]
    return {LOGGERS: [name for name in names if name in by_name()[LOGGERS].names]}


def resumed(value: Any, given: Given) -> Outcome:
    """Convert resume_mode; auto and disable have the same meaning."""
    return {"trainer.resume_mode": value if value in ("auto", "disable") else Open(NO_RESUME)}


def token_level_loss(value: Any, given: Given) -> Outcome:
    """Convert use_token_level_loss of early versions."""
    return {"actor.loss_agg_mode": "token-mean" if value else Open("the mean of early versions of verl is unknown")}


def aggregation(value: Any, given: Given) -> Outcome:
    """Convert loss_mode and loss_agg_mode, which verl ignores in the policy loss of BY_SEQUENCE."""
    mode, by = (given.get(name) for name in (LOSS_MODE, LOSS_AGG_MODE))
    found = {key: each for key, each in (("actor.loss_mode", mode), ("actor.loss_agg_mode", by)) if each is not None}
    if mode not in BY_SEQUENCE:
        return found
    others = [given.get(f"actor_rollout_ref.actor.{name}") for name in ("use_kl_loss", "entropy_coeff")]
    if any(others) and by != "seq-mean-token-mean":
        why = f"verl aggregates the loss of {mode} by seq-mean-token-mean, KL loss and entropy bonus by loss_agg_mode"
        return found | {"actor.loss_agg_mode": Open(why)}
    return found | {"actor.loss_agg_mode": "seq-mean-token-mean"}


def filter_metric(value: Any, given: Given) -> Outcome:
    """Convert the metric that dynamic sampling compares, which is the reward in rlfuse."""
    penalised = any(given.get(f"{group}.enable") for group in OVERLONG)
    if not given.get("algorithm.filter_groups.enable") or (value in ("acc", "score") and not penalised):
        return "groups are compared by their rewards"
    if value in ("reward", "seq_reward", "seq_final_reward", None):
        return ""
    return {"algorithm.filter_groups.enable": Open("groups are compared by their rewards, with the overlong penalty")}


def engine(value: Any, given: Given) -> Outcome:
    """Convert the rollout engine: any of verl's samples from the same model."""
    name = "vllm" if ENGINES.fullmatch(str(value)) else "transformers" if value == "hf" else value
    return {"rollout.name": name}


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
    "actor_rollout_ref.actor.tis_imp_ratio_cap": truncation,
    **{key: bounds(key) for key in (f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_rs_threshold")},
    **dict.fromkeys(BYPASS, renamed("algorithm.old_log_probs", off=False, to="engine")),
    **{f"{group}.{leaf}": custom_reward for group in REWARD for leaf in ("path", "name", "reward_kwargs")},
    **dict.fromkeys(("reward_model.enable", "reward_model.model.path"), reward_model),
    **dict.fromkeys(("reward.reward_model.enable", "reward.reward_model.model_path"), reward_model),
    **{f"{group}.{leaf}": overlong for group in OVERLONG for leaf in ("enable", "len")},
    "data.gen_batch_size": generated_batch,
    "trainer.default_local_dir": run_folder,
    "trainer.logger": loggers,
    "trainer.resume_mode": resumed,
    "trainer.resume_from_path": lambda value, _: {"trainer.resume_mode": Open(NO_RESUME)} if value else "",
    "actor_rollout_ref.rollout.name": engine,
    "actor_rollout_ref.rollout.do_sample": lambda value, _: (
        "" if value else {"rollout.temperature": Open("training requires sampled responses")}
    ),
    "algorithm.adv_estimator": lambda value, _: {"algorithm.adv_estimator": SAME.get(str(value), value)},
    "algorithm.filter_groups.metric": filter_metric,
    LOSS_MODE: aggregation,
    LOSS_AGG_MODE: aggregation,
    "actor_rollout_ref.actor.use_token_level_loss": token_level_loss,
    "actor_rollout_ref.actor.use_gpg_loss": renamed("actor.loss_mode", off=False, to="gpg"),
    f"{VALIDATION}.do_sample": greedy,
    f"{VALIDATION}.temperature": validation_temperature,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _ULYSSES,
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": _ULYSSES,
    "actor_rollout_ref.actor.fsdp_config.full_determinism": renamed("trainer.deterministic", off=False),
    "reward_model.rollout.name": renamed("reward.model_backend"),
    "reward.reward_model.rollout.name": renamed("reward.model_backend"),
}


def translate(command: Command) -> Translation:
    """Translate a verl command to the equivalent job."""
    job, given, later = Translation("verl"), command.settings, []
    for name, value in given.items():
        in_verl = f"{name}={as_typed(value)}"
        if name in CONVERSIONS:
            outcome = CONVERSIONS[name](value, given)
            if isinstance(outcome, dict):
                for key, converted in outcome.items():
                    job.set(key, converted, in_verl, "" if (key, converted) == (name, value) else in_verl)
            elif outcome:
                job.note(outcome, in_verl)
        elif name.startswith(REWARD_KWARGS) and any(given.get(f"{group}.path") for group in REWARD):
            continue  # part of the entry of reward.functions
        elif name in by_name() or is_free(name):
            job.set(name, value, in_verl)
        else:
            later.append((name, value, in_verl))
    for name, value, in_verl in later:
        _translate_other(job, given, name, value, in_verl)
    if {"reward.functions", "reward.model_path"} <= job.settings.keys():
        job.leave_open("reward.functions", "verl uses the score of the reward model alone; rlfuse adds both")
    _leave_unknown_open(job, command)
    _fill_in(job, command)
    for (key, value), how in DIFFERENCES.items():
        if job.settings.get(key) is not None and value in (None, job.settings[key]):
            job.comments[key] = "; ".join(filter(None, (job.comments[key], how)))
    return job


def _translate_other(job: Translation, given: Given, name: str, value: Any, in_verl: str) -> None:
    found = counterpart(name, frozenset(by_name()))
    found = found if found is not None and found.origin == "verl" else None
    if found is not None and found.is_same:
        written = found.values.get(as_typed(value))
        ours = value if written is None else yaml.safe_load(written)
        job.set(found.keys[0], ours, in_verl, in_verl if written else name)
    elif job.has_row(name, exactly=True):
        job.decide(name, value)
    elif WITHOUT_EFFECT.search(name) or value in (None, False, {}, []):
        job.note(found.note if found is not None and not found.keys else "no effect on what is trained", in_verl)
    elif job.has_row(name):
        job.decide(name, value)
    elif found is None:
        job.leave_open("trainer.task", f"{in_verl}: rlfuse has no such setting")
    elif not found.keys:
        job.note(found.note, in_verl)
    else:
        _share(job, given, found, name, value, in_verl)


def _share(job: Translation, given: Given, found: Counterpart, name: str, value: Any, in_verl: str) -> None:
    """Handle a setting that shares a key of rlfuse with others."""
    key = found.keys[0]
    ours = job.settings.get(key, DEFAULTS.get(key, by_name()[key].default))
    has_critic = given.get("algorithm.adv_estimator", "gae") == "gae"
    if value == ours:
        return
    if key == "data.seed" or not affects_training(key) or (name.startswith("critic.") and not has_critic):
        job.note(f"{key} in rlfuse: {found.note}", in_verl)
    else:
        job.leave_open(key, f"{in_verl}: {found.note}")


def _leave_unknown_open(job: Translation, command: Command) -> None:
    """Leave keys open whose values are not in the command, and settings in files that are not read."""
    known = frozenset(by_name())
    for setting, why in command.unknown.items():
        name = setting.partition("=")[0]
        found = None if name in known else counterpart(name, known)
        key = found.keys[0] if found is not None and found.keys else name
        if key in known:
            job.leave_unknown(key, setting, why)
        elif found is not None or WITHOUT_EFFECT.search(name):
            job.note(why, setting)
        else:
            job.leave_open("trainer.task", f"{setting}: {why}")
    for word, why in command.unread.items():
        option, _, value = word.partition("=")
        if option == "--config-path" and value in ("config", "./config"):
            continue  # verl's own, next to main_ppo
        if option == "--config-name" and value.removesuffix(".yaml") in CONFIGS:
            job.note("has verl's defaults", word)
        else:
            job.leave_open("trainer.task", f"{word}: {why}")
    if command.program and PROGRAMS.search(command.program) is None:
        job.leave_open("trainer.task", f"{command.program}: is not verl.trainer.main_ppo, and may train something else")


def _fill_in(job: Translation, command: Command) -> None:
    """Add verl's defaults for keys that the command does not set."""
    for key, value in DEFAULTS.items():
        if key not in job.settings and key not in job.undecided:
            job.set(key, value, "", "verl's default")
    _set_zero_stage(job, command)
    has_critic = command.settings.get("algorithm.adv_estimator", "gae") == "gae"
    for key in ("data.train_files", "model.path", *["critic.path"] * has_critic):
        if key not in job.settings and key not in job.undecided:
            job.leave_open(key, "the command does not set it, and verl's default is a folder in your home")
    if "wandb" in job.settings.get(LOGGERS, ["wandb"]):
        job.set_wandb_mode(command.environment)
    if not {"reward.functions", "reward.model_path"} & (job.settings.keys() | job.undecided.keys()):
        _choose_reward(job)


def _set_zero_stage(job: Translation, command: Command) -> None:
    """Shard as verl's FSDP does, unless one rank has all: its full shards are ZeRO 3, without resharding ZeRO 2."""
    actor, given = "actor_rollout_ref.actor", command.settings
    strategy = given.get(f"{actor}.strategy", "megatron" if "megatron" in str([*command.unread]) else "fsdp")
    is_unknown = any(setting.startswith(f"{actor}.strategy=") for setting in command.unknown)
    ranks = [job.settings.get(key) for key in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    if strategy not in ("fsdp", "fsdp2") or is_unknown or given.get(f"{actor}.fsdp_config.fsdp_size") == 1:
        return
    if ranks not in ([1, 1], [None, 1]):
        reshards = given.get(f"{actor}.fsdp_config.reshard_after_forward", True)
        why = "1 overlaps more of a step, if it fits (see rlfuse plan)"
        job.set("actor.zero_stage", 3 if reshards else 2, "", f"as verl's FSDP; {why}")


def _choose_reward(job: Translation) -> None:
    """Set the verifiers for verl's example data; verl chooses by data_source."""
    files = job.settings.get("data.train_files", [])
    found = {verifier: source for file in files for name, verifier, source in VERIFIERS if name.search(file)}
    if not files or not all(any(name.search(file) for name, _, _ in VERIFIERS) for file in files):
        job.leave_open(
            "reward.functions",
            "verl scores by data_source with default_compute_score; write path/file.py:function, a verifier of rlfuse, "
            "or verl.utils.reward_score:default_compute_score if verl is installed",
        )
        return
    several = [{"path": verifier, "sources": [source]} for verifier, source in found.items()]
    comment = "verl chooses by data_source; other than in verl, the answer need not follow #### or be in a box"
    job.set("reward.functions", several if len(found) > 1 else [*found], "", comment)
