"""Translate the flags of `openrlhf.cli.train_ppo_ray`. Pure. `DEFAULTS` are OpenRLHF's, by flag."""

from __future__ import annotations

import re
from typing import Any

from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.other_frameworks import OPENRLHF, keys_of
from rlfuse.tools.translate.arguments import Command
from rlfuse.tools.translate.job import Open, Translation

PROGRAM = "train_ppo_ray"
DEFAULTS: dict[str, Any] = {
    "rollout_batch_size": 1024,
    "train_batch_size": 128,
    "n_samples_per_prompt": 1,
    "max_epochs": 1,
    "num_episodes": 1,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "l2": 0.0,
    "max_norm": 1.0,
    "adam_betas": [0.9, 0.95],
    "advantage_estimator": "gae",
    "gamma": 1.0,
    "lambd": 1.0,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "eps_clip": 0.2,
    "dual_clip": None,
    "value_clip": 0.5,
    "policy_loss_type": "ppo",
    "temperature": 1.0,
    "input_key": "input",
    "apply_chat_template": False,
    "gradient_checkpointing": False,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "vllm_tensor_parallel_size": 1,
    "zero_stage": 2,
    "save_steps": -1,
    "eval_steps": -1,
    "max_ckpt_num": 3,
    "seed": 42,
    "reward_clip_range": [-10.0, 10.0],
    "overlong_buffer_len": 0,
    "freezing_actor_steps": -1,
}
DIRECT = {
    "max_epochs": "actor.ppo_epochs",
    "train_max_tokens_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "max_norm": "actor.grad_clip",
    "gamma": "algorithm.gamma",
    "dual_clip": "actor.clip_ratio_c",
    "entropy_loss_coef": "actor.entropy_coeff",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "packing_samples": "model.use_remove_padding",
    "adam_offload": "actor.offload_optimizer",
    "zero_stage": "actor.zero_stage",
    "ring_attn_size": "training.ulysses_sequence_parallel_size",
    "actor_num_nodes": "trainer.nnodes",
    "actor_num_gpus_per_node": "trainer.n_gpus_per_node",
    "eval_temperature": "rollout.val_kwargs.temperature",
    "eval_n_samples_per_prompt": "rollout.val_kwargs.n",
    "overlong_penalty_factor": "reward.overlong_buffer.penalty_factor",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "max_ckpt_num": "trainer.max_ckpt_to_keep",
    "seed": "data.seed",
    "full_determinism": "trainer.deterministic",
    "wandb_project": "trainer.project_name",
    "wandb_run_name": "trainer.experiment_name",
    "dynamic_filtering": "algorithm.filter_groups.enable",
    **keys_of(
        OPENRLHF,
        "pretrain rollout_batch_size n_samples_per_prompt num_episodes prompt_max_len generate_max_len "
        "micro_train_batch_size actor_learning_rate critic_learning_rate lr_warmup_ratio l2 lambd value_clip input_key "
        "apply_chat_template vllm_tensor_parallel_size vllm_gpu_memory_utilization save_path",
    ),
}
"""Flags that only have another name."""
ESTIMATORS = {
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
UNKNOWN = {
    "prompt_data": ("data.train_files",),
    "eval_dataset": ("data.val_files",),
    "remote_rm_url": ("reward.functions",),
    "reward_pretrain": ("reward.model_path",),
    "n_samples_per_prompt": ("rollout.n", "actor.ppo_mini_batch_size"),
    "train_batch_size": ("actor.ppo_mini_batch_size",),
}
"""Flags whose value may be missing in a script -> keys to decide."""
CORRECTION = ("enable_vllm_is_correction", "vllm_enable_is_correction")
READ = {
    *("train_batch_size", "lr_scheduler", "adam_betas", "advantage_estimator", "init_kl_coef", "kl_estimator"),
    *("use_kl_estimator_k3", "use_kl_loss", "kl_target", "kl_horizon", "eps_clip", "eps_clip_low_high"),
    *("policy_loss_type", "prompt_data", "eval_dataset", "max_samples", "reward_pretrain", "critic_pretrain"),
    *("remote_rm_url", "reward_clip_range", "overlong_buffer_len", "freezing_actor_steps", "use_wandb"),
    *("use_tensorboard", "vllm_is_truncated_threshold", "vllm_is_correction_type", "use_icepop", *CORRECTION),
}
WITHOUT_EFFECT = re.compile(
    r"(ref|reward|critic)_num_|colocate|vllm_|ckpt|save_|logging_|micro_|rollout_max|rollout_tasks|use_dynamic_batch"
    r"|use_wandb|use_tensorboard|enforce_eager|deepspeed|fsdp|ds_|flash_attn|attn_impl|bf16|param_dtype|zpg|overlap_comm|grad_accum|actor_init"
    r"|enable_prefix|disable_|eval_split|wandb_|ring_head|load_checkpoint|local_rank|perf|use_ms"
    r"|value_head|ref_reward|use_liger|gradient_checkpointing_use|async_queue|max_len$|deepcompile|colocate_|ptx_coef"
)
"""Flags that do not change what is trained."""


def translate(command: Command) -> Translation:
    """Translate an OpenRLHF command to the equivalent job."""
    job, given = Translation("OpenRLHF"), command.settings

    def value(name: str) -> Any:
        return command.value(name, DEFAULTS.get(name))

    def put(key: str, converted: Any, *names: str) -> None:
        shown = ", ".join(f"{name}={as_typed(given[name])}" for name in names if name in given) or "OpenRLHF's default"
        job.set(key, converted, shown, shown)

    if command.program != PROGRAM:
        job.leave_open("trainer.task", f"{command.program}: only {PROGRAM} is translated")
    has_critic = value("advantage_estimator") == "gae"
    for name, key in DIRECT.items():
        if (name in given or name in DEFAULTS) and (has_critic or not key.startswith("critic.")):
            put(key, value(name), name)
    _batch(value, put)
    _optimizer(job, given, value, put)
    _objective(command, value, put)
    _data(job, given, command)
    _rewards(job, given, command.unknown, value, put)
    _logging(job, given, command)
    _others(job, command)
    return job


def _batch(value: Any, put: Any) -> None:
    samples, n = value("train_batch_size"), max(1, value("n_samples_per_prompt"))
    prompts = samples // n if samples % n == 0 else Open(f"{samples} samples are not whole groups of {n}")
    put("actor.ppo_mini_batch_size", prompts, "train_batch_size", "n_samples_per_prompt")


def _optimizer(job: Translation, given: dict[str, Any], value: Any, put: Any) -> None:
    schedule = value("lr_scheduler")
    put("actor.optim.lr_scheduler_type", "cosine" if schedule == "cosine_with_min_lr" else schedule, "lr_scheduler")
    if schedule == "cosine_with_min_lr":
        put("actor.optim.min_lr_ratio", 0.1, "lr_scheduler")
    put("actor.optim.betas", [float(each) for each in value("adam_betas")], "adam_betas")
    for leaf in ("lr_scheduler_type", "min_lr_ratio", "betas", "weight_decay", "lr_warmup_steps_ratio"):
        actor, critic = f"actor.optim.{leaf}", f"critic.optim.{leaf}"
        if actor in job.settings and value("advantage_estimator") == "gae":
            job.set(critic, job.settings[actor], actor, "as the actor's")


def _objective(command: Command, value: Any, put: Any) -> None:
    given = command.settings
    estimator, coefficient = value("advantage_estimator"), value("init_kl_coef")
    put("algorithm.adv_estimator", ESTIMATORS.get(estimator, estimator), "advantage_estimator")
    if estimator in ("group_norm", "dr_grpo"):
        put("algorithm.norm_adv_by_std_in_grpo", estimator == "group_norm", "advantage_estimator")
    kind = "k3" if given.get("use_kl_estimator_k3") else value("kl_estimator")
    names = ("init_kl_coef", "use_kl_loss", "kl_estimator", "use_kl_estimator_k3")
    in_loss = bool(given.get("use_kl_loss")) and coefficient > 0
    put("actor.use_kl_loss", in_loss, *names)
    put("algorithm.use_kl_in_reward", coefficient > 0 and not in_loss, *names)
    if in_loss:
        put("actor.kl_loss_coef", coefficient, "init_kl_coef")
        put("actor.kl_loss_type", kind, "kl_estimator", "use_kl_estimator_k3")
    elif coefficient > 0:
        put("algorithm.kl_ctrl.kl_coef", coefficient, "init_kl_coef")
        put("algorithm.kl_penalty", kind, "kl_estimator", "use_kl_estimator_k3")
    if given.get("kl_target"):
        put("algorithm.kl_ctrl.type", "adaptive", "kl_target")
        put("algorithm.kl_ctrl.target_kl", given["kl_target"], "kl_target")
        put("algorithm.kl_ctrl.horizon", given.get("kl_horizon", 10000), "kl_horizon")
    low, high = command.value("eps_clip_low_high", [value("eps_clip")] * 2)
    put("actor.clip_ratio_low", low, "eps_clip_low_high", "eps_clip")
    put("actor.clip_ratio_high", high, "eps_clip_low_high", "eps_clip")
    loss = value("policy_loss_type")
    put("actor.loss_mode", {"ppo": "vanilla"}.get(loss, loss), "policy_loss_type")
    put("actor.loss_agg_mode", "seq-mean-token-mean" if loss == "gspo" else "token-mean", "policy_loss_type")
    if any(given.get(name) for name in CORRECTION):
        _correction(given, put)
    if value("overlong_buffer_len"):
        put("reward.overlong_buffer.len", int(value("overlong_buffer_len")), "overlong_buffer_len")
    if value("freezing_actor_steps") > 0:
        put("trainer.critic_warmup", value("freezing_actor_steps") + 1, "freezing_actor_steps")


def _correction(given: dict[str, Any], put: Any) -> None:
    kind = "icepop" if given.get("use_icepop") else given.get("vllm_is_correction_type", "tis")
    threshold = given.get("vllm_is_truncated_threshold", Open("write the bounds") if kind == "icepop" else 2.0)
    names = ("vllm_is_truncated_threshold", "vllm_is_correction_type", "use_icepop", *CORRECTION)
    level = "token" if kind in ("tis", "icepop") else Open(f"{kind} has no equal")
    put("algorithm.rollout_correction.rollout_is", level, *names)
    if isinstance(threshold, list) and kind == "icepop":
        put("algorithm.rollout_correction.rollout_is_threshold_lower", threshold[0], *names)
        put("algorithm.rollout_correction.rollout_is_threshold", threshold[1], *names)
    elif isinstance(threshold, list):
        put("algorithm.rollout_correction.rollout_is", Open("rlfuse raises no weight to a lower bound"), *names)
    else:
        put("algorithm.rollout_correction.rollout_is_threshold", threshold, *names)


def _data(job: Translation, given: dict[str, Any], command: Command) -> None:
    for name, key in (("prompt_data", "data.train_files"), ("eval_dataset", "data.val_files")):
        dataset = str(given.get(name) or "")
        if dataset:
            first = "max_samples" in given and name == "prompt_data"
            job.set_files(key, name, dataset, f", the first {given['max_samples']} rows" if first else "")
        elif name == "prompt_data" and not any(each.startswith(name) for each in command.unknown):
            job.leave_open(key, "the command does not set prompt_data")


def _rewards(job: Translation, given: dict[str, Any], unknown: dict[str, str], value: Any, put: Any) -> None:
    low, high = value("reward_clip_range")
    clip = {"clip": [float(low), float(high)]}
    paths = [each for each in str(given.get("remote_rm_url") or "").split(",") if each]
    if paths:
        paths = [f"{path}:reward_func" if path.endswith(".py") else path for path in paths]
        put("reward.functions", [{"path": path, **clip} for path in paths], "remote_rm_url", "reward_clip_range")
    elif given.get("reward_pretrain"):
        put("reward.model_path", given["reward_pretrain"], "reward_pretrain")
        put("reward.functions", [{"path": "reward_model", **clip}], "reward_clip_range")
    elif "agent_func_path" not in given and not any(each.startswith(("remote_rm", "reward_p")) for each in unknown):
        job.leave_open("reward.functions", "the command sets neither remote_rm_url nor reward_pretrain")
    if value("advantage_estimator") == "gae":
        critic = given.get("critic_pretrain") or given.get("reward_pretrain") or given.get("pretrain")
        put("critic.path", critic, "critic_pretrain", "reward_pretrain")


def _logging(job: Translation, given: dict[str, Any], command: Command) -> None:
    used = [name for name in ("wandb", "tensorboard") if given.get(f"use_{name}")]
    known = [name for name in used if name in by_name()["trainer.logger"].names]
    job.set("trainer.logger", ["console", *known], "", ", ".join(f"use_{name}" for name in used))
    if "wandb" in known:
        job.set_wandb_mode(command.environment)


def _others(job: Translation, command: Command) -> None:
    name, translated = "stop_properly_penalty_coef", READ | DIRECT.keys()
    penalty = command.settings.get(name)
    if penalty is not None and penalty >= 0:
        job.leave_open("reward.functions", f"{name}={penalty}: the reward of truncated responses is not scaled")
        translated |= {name}
    job.report_rest(command, translated, {flag: (key,) for flag, key in DIRECT.items()} | UNKNOWN, WITHOUT_EFFECT)
