"""Setting names of verl, TRL and OpenRLHF, each with its counterpart in rlfuse or the reason why there is none.

A counterpart of a verl name without a note has the same meaning and accepts verl's default. Names that are also keys of
rlfuse are only in `other_meanings`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counterpart:
    """The rlfuse key for a setting name of another framework."""

    origin: str
    keys: tuple[str, ...]
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        """True if only the name differs, except for `values`."""
        return bool(self.keys) and not self.note


_VERL = (
    ("actor.ppo_micro_batch_size_per_gpu", "sequences per rank; verl counts those of all ranks",
     "actor_rollout_ref.actor.ppo_micro_batch_size critic.ppo_micro_batch_size"),
    ("actor.offload_optimizer", "", "actor_rollout_ref.actor.fsdp_config.optimizer_offload"),
    ("model.dtype", "one setting for engines and training",
     "actor_rollout_ref.actor.fsdp_config.dtype actor_rollout_ref.rollout.dtype"),
    ("data.seed", "one seed for the run",
     "actor_rollout_ref.actor.fsdp_config.seed actor_rollout_ref.rollout.seed "
     "actor_rollout_ref.actor.data_loader_seed"),
    ("actor.grad_clip", "", "actor_rollout_ref.actor.optim.clip_grad"),
    ("actor.optim.lr_scheduler_type", "", "actor_rollout_ref.actor.optim.warmup_style"),
    ("critic.optim.lr_scheduler_type", "", "critic.optim.warmup_style"),
    ("actor.optim.lr_scheduler_type", "constant, linear, cosine or wsd",
     "actor_rollout_ref.actor.optim.lr_decay_style"),
    ("critic.optim.lr_scheduler_type", "constant, linear, cosine or wsd", "critic.optim.lr_decay_style"),
    ("actor.optim.eps", "", "actor_rollout_ref.actor.optim.override_optimizer_config.eps"),
    ("critic.optim.eps", "", "critic.optim.override_optimizer_config.eps"),
    ("trainer.total_training_steps", "the number of steps of the run, which verl copies to this setting",
     "actor_rollout_ref.actor.optim.total_training_steps"),
    ("algorithm.rollout_correction.rollout_is_threshold", "with rollout_is=token; -1 is rollout_is=null",
     "actor_rollout_ref.actor.tis_imp_ratio_cap"),
    ("model.use_remove_padding", "", "actor_rollout_ref.model.use_rmpad"),
    ("actor.strategy", "deepspeed, sharded by actor.zero_stage; fsdp2 on CPUs",
     "actor_rollout_ref.actor.strategy critic.strategy"),
    ("training.tensor_model_parallel_size", "one setting for all models; requires ZeRO 0 or 1",
     "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"),
    ("", "LoRA is not supported; all weights are trained", "actor_rollout_ref.model.lora_adapter_path"),
    ("ref.path", "", "actor_rollout_ref.ref.model.path"),
    ("ref.path", "the teacher, with algorithm=distill", "distillation.teacher_models.teacher_model.model_path"),
    ("algorithm.adv_estimator", "`distill` instead of true", "distillation.enabled"),
    ("data.max_prompt_length", "", "actor_rollout_ref.rollout.prompt_length"),
    ("data.max_response_length", "", "actor_rollout_ref.rollout.response_length"),
    ("rollout.temperature", "for greedy validation set rollout.val_kwargs.temperature=0",
     "actor_rollout_ref.rollout.do_sample"),
    ("rollout.update_weights_bucket_mb", "",
     "actor_rollout_ref.rollout.update_weights_bucket_megabytes "
     "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"),
    ("rollout.weight_transfer", "auto | shm | ipc", "actor_rollout_ref.rollout.checkpoint_engine.backend"),
    ("video.freeze_vision_tower", "", "actor_rollout_ref.actor.freeze_vision_tower"),
    ("cluster.timeout_s", "timeout of worker starts and remote calls", "actor_rollout_ref.nccl_timeout"),
    ("critic.path", "", "critic.model.path"),
    ("actor.grad_clip", "one setting for actor and critic", "critic.optim.clip_grad"),
    ("algorithm.adv_estimator", "gae uses a critic, the others do not", "critic.enable"),
    ("reward.functions", "as reward.functions=[path/file.py:function]",
     "custom_reward_function.path custom_reward_function.name reward.custom_reward_function.path "
     "reward.custom_reward_function.name"),
    ("reward.model_path", "setting a path enables it; in verl `enable` does",
     "reward.reward_model.model_path reward_model.model.path"),
    ("reward.model_path", "a path enables it; omit the key for `false`",
     "reward.reward_model.enable reward_model.enable"),
    ("reward.num_workers", "", "reward_model.num_workers"),
    ("reward.batch_items", "", "reward_model.micro_batch_size_per_gpu"),
    ("model.trust_remote_code", "one setting for all models", "reward_model.model.trust_remote_code"),
    ("reward.device", "reward models share the slots' GPUs", "reward_model.enable_resource_pool"),
    ("reward.model_backend", "vllm | hf", "reward_model.rollout.name reward.reward_model.rollout.name"),
    ("reward.functions", "as {path: path/file.py:function, kwargs: {...}}", "custom_reward_function.reward_kwargs"),
    ("reward.functions", "each reward function is a dimension", "algorithm.gdpo_reward_keys"),
    ("reward.weights", "", "algorithm.gdpo_reward_weights"),
    ("algorithm.rollout_correction.rollout_is", "", "algorithm.rollout_is"),
    ("algorithm.rollout_correction.rollout_is_threshold", "", "algorithm.rollout_is_threshold"),
    ("algorithm.old_log_probs", "`engine` instead of true", "algorithm.rollout_correction.bypass_mode"),
    ("trainer.resume_mode", "set it to the folder", "trainer.resume_from_path"),
    ("trainer.max_ckpt_to_keep", "", "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep"),
    ("model.trust_remote_code", "", "data.trust_remote_code"),
    ("cluster.device", "", "trainer.device"),
    ("data.seed", "", "trainer.seed"),
)  # fmt: skip
"""(rlfuse key, note, verl names that the rules below do not map)."""
VERL = {name: (key, note) for key, note, names in _VERL for name in names.split()}
VERL_TOP_GROUPS = {name.partition(".")[0] for name in VERL}
VERL_VALUES = {"algorithm.rollout_is": {"true": "token", "false": "null"}}
"""verl name -> values that rlfuse writes differently; all others are equal."""

VERL_LEAVES = {
    "ulysses_sequence_parallel_size": (
        "training.ulysses_sequence_parallel_size",
        "one setting for all models; the size used depends on sequence lengths",
    ),
    "full_determinism": ("trainer.deterministic", "one setting for the run"),
}
"""Leaf names with the same meaning in several groups of verl."""

SAME_NAME = {
    "trainer.default_local_dir": "rlfuse creates PROJECT/EXPERIMENT below it; in verl it is the run folder itself"
}
"""Keys that exist in verl with a different meaning -> the difference."""

VERL_PREFIXES = (
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.", "rollout.engine_kwargs."),
    ("actor_rollout_ref.actor.policy_loss.", "actor."),
    ("actor_rollout_ref.actor.", "actor."),
    ("actor_rollout_ref.rollout.", "rollout."),
    ("actor_rollout_ref.model.", "model."),
    ("actor_rollout_ref.ref.", "ref."),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.", "reward.overlong_buffer."),
    ("reward.reward_kwargs.overlong_buffer_cfg.", "reward.overlong_buffer."),
    ("reward_model.overlong_buffer.", "reward.overlong_buffer."),
    ("custom_reward_function.overlong_buffer.", "reward.overlong_buffer."),
    ("critic.model.", "model."),
    ("critic.", "actor."),
)

OVERLONG = re.compile(r"\.overlong_buffer(_cfg)?\.(enable|len)$")
VERL_ROOT = "actor_rollout_ref."
"""verl's group of actor, rollout and reference."""
VERL_GROUPS = (VERL_ROOT, "critic.", "reward_model.", "reward.reward_model.", "actor.", "ref.")

VLLM_OPTIONS = {
    "max_num_batched_tokens",
    "enforce_eager",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "swap_space",
    "disable_log_stats",
}

_NO_COUNTERPART = (
    ("generation and training always share the slots", "actor_rollout_ref.hybrid_engine"),
    ("tokens are always balanced over the ranks", "trainer.balance_batch"),
    ("for validation only, use `rlfuse eval` instead of `rlfuse train`", "trainer.val_only"),
    ("the number of prompts per step is data.train_batch_size", "data.gen_batch_size"),
    ("all files are written below trainer.default_local_dir", "trainer.default_hdfs_dir"),
    ("cluster.timeout_s limits the start of workers", "trainer.ray_wait_register_center_timeout"),
    ("all validation rows are generated together", "data.val_batch_size"),
    ("the column is always data_source", "data.reward_fn_key"),
    ("prompts are always kept as messages; reward functions with TRL's signature get them as `prompts`",
     "data.return_raw_chat"),
    ("the column is always images", "data.image_key"),
    ("the column is always videos; the group video sets the sampling of frames", "data.video_key"),
    ("engines always return log-probs", "actor_rollout_ref.rollout.calculate_log_probs"),
    ("engines load model.path, and then receive weights from the trainer", "actor_rollout_ref.rollout.load_format"),
    ("engines are always asynchronous", "actor_rollout_ref.rollout.mode"),
    ("only single-turn rollouts are supported", "actor_rollout_ref.rollout.multi_turn actor_rollout_ref.rollout.agent"),
    ("rollout.val_kwargs.temperature=0 is greedy", "actor_rollout_ref.rollout.val_kwargs.do_sample"),
    ("LoRA is not supported; all weights are trained", "actor_rollout_ref.model.lora"),
    ("edit config.json of the model", "actor_rollout_ref.model.override_config"),
    ("reward functions are called for every sample; name them in reward.functions",
     "reward_model.reward_manager reward.reward_manager"),
    ("rewards are computed during generation unless fusion=serial", "reward_model.launch_reward_fn_async"),
    ("code in responses runs in a sandbox on the machines of the job, without a service",
     "reward.sandbox_fusion sandbox_fusion"),
    ("groups are compared by their rewards", "algorithm.filter_groups.metric"),
    ("the number of engines is slots / rollout.tensor_model_parallel_size",
     "actor_rollout_ref.rollout.data_parallel_size"),
    ("Ray uses the devices of this machine, or connects to cluster.ray_address", "ray_kwargs ray_init"),
    ("every run records its events in the run folder", "global_profiler"),
)  # fmt: skip
"""(why there is no counterpart, verl names or prefixes)."""
NO_COUNTERPART = tuple((name, why) for why, names in _NO_COUNTERPART for name in names.split())

NO_COUNTERPART_WORDS = (
    ("megatron", "training uses DeepSpeed, not Megatron; for sharding set actor.zero_stage"),
    ("fsdp", "training uses DeepSpeed, not FSDP; for sharding set actor.zero_stage"),
    ("use_dynamic_bsz", "micro-batches are always filled by tokens, up to actor.ppo_max_token_len_per_gpu"),
    ("log_prob_", "passes without gradients use the token budget actor.ppo_max_token_len_per_gpu"),
    ("lora_", "LoRA is not supported; all weights are trained"),
    (".lora.", "LoRA is not supported; all weights are trained"),
    ("profiler", "every run records its events in the run folder"),
    ("torch_compile", "training does not use torch.compile; actor.cuda_graphs captures passes of small models"),
)
"""(word in a verl name, why there is no counterpart)."""

_TRL_AND_OPENRLHF = (
    ("actor.ppo_micro_batch_size_per_gpu", "sequences per micro-batch on a rank", "per_device_train_batch_size", ""),
    ("actor.ppo_mini_batch_size", "prompts per optimizer step, from which gradient accumulation follows",
     "gradient_accumulation_steps", ""),
    ("rollout.n", "", "num_generations", "n_samples_per_prompt"),
    ("actor.ppo_epochs", "", "num_iterations num_ppo_epochs", ""),
    ("data.max_response_length", "", "max_completion_length response_length", "generate_max_len"),
    ("data.apply_chat_template_kwargs", "", "chat_template_kwargs", ""),
    ("rollout.temperature", "", "temperature", ""),
    ("rollout.top_p", "", "top_p", ""),
    ("rollout.top_k", "-1 for all", "top_k", ""),
    ("rollout.min_p", "", "min_p", ""),
    ("actor.optim.lr", "", "learning_rate", "actor_learning_rate"),
    ("actor.optim.lr_warmup_steps", "counted in training steps, in TRL in optimizer steps", "warmup_steps", ""),
    ("actor.optim.lr_scheduler_type", "cosine_with_min_lr is cosine, warmup_stable_decay is wsd", "lr_scheduler_type",
     "lr_scheduler"),
    ("actor.mask_truncated_completions", "", "mask_truncated_completions", ""),
    ("ref.sync_ref_model", "", "sync_ref_model", ""),
    ("ref.ref_model_mixup_alpha", "", "ref_model_mixup_alpha", ""),
    ("ref.ref_model_sync_steps", "counted in training steps, in TRL in optimizer steps", "ref_model_sync_steps", ""),
    ("actor.optim.betas", "both in one list", "adam_beta1 adam_beta2", "adam_betas"),
    ("actor.optim.eps", "", "adam_epsilon", ""),
    ("actor.optim.weight_decay", "", "weight_decay", "l2"),
    ("actor.grad_clip", "", "max_grad_norm", ""),
    ("actor.kl_loss_coef", "with actor.use_kl_loss=true", "beta", ""),
    ("algorithm.kl_ctrl.kl_coef", "with algorithm.use_kl_in_reward=true", "kl_coef", "init_kl_coef"),
    ("actor.clip_ratio", "", "epsilon cliprange", "eps_clip"),
    ("actor.clip_ratio_high", "", "epsilon_high", ""),
    ("critic.optim.lr", "actor and critic are separate models with separate learning rates",
     "vf_coef", ""),
    ("actor.loss_agg_mode", "or a preset: algorithm=grpo | dr_grpo | dapo | cispo | sapo", "loss_type", ""),
    ("actor.tau_pos", "", "sapo_temperature_pos", ""),
    ("actor.tau_neg", "", "sapo_temperature_neg", ""),
    ("algorithm.rollout_correction.rollout_is", "token_truncate is token, sequence_truncate sequence",
     "vllm_importance_sampling_mode", ""),
    ("algorithm.rollout_correction.rollout_is_threshold", "with rollout_is=token or sequence",
     "vllm_importance_sampling_clip_max", ""),
    ("algorithm.rollout_correction.rollout_is_threshold_lower", "with rollout_is=token or sequence; masks both sides",
     "vllm_importance_sampling_clip_min", ""),
    ("algorithm.norm_adv_by_std_in_grpo", "", "scale_rewards", ""),
    ("model.enable_gradient_checkpointing", "", "gradient_checkpointing", ""),
    ("model.path", "", "model_name_or_path", "pretrain"),
    ("ref.path", "with algorithm=distill", "teacher_model teacher_model_name_or_path", ""),
    ("reward.model_path", "", "reward_model_path", "reward_pretrain"),
    ("reward.functions", "", "reward_funcs", ""),
    ("reward.weights", "", "reward_weights", ""),
    ("algorithm.adv_estimator", "normalize_then_sum is gdpo", "multi_objective_aggregation", ""),
    ("trainer.total_training_steps", "", "max_steps", ""),
    ("trainer.total_epochs", "", "num_train_epochs", "num_episodes"),
    ("trainer.save_freq", "", "save_steps", ""),
    ("trainer.test_freq", "", "eval_steps", ""),
    ("trainer.max_ckpt_to_keep", "", "save_total_limit", ""),
    ("trainer.default_local_dir", "", "output_dir", "save_path"),
    ("trainer.experiment_name", "", "run_name", ""),
    ("trainer.logger", "", "report_to", "use_wandb"),
    ("algorithm.kl_ctrl.target_kl", "with algorithm.kl_ctrl.type=adaptive", "", "kl_target"),
    ("algorithm.kl_penalty", "", "", "kl_estimator"),
    ("critic.path", "", "", "critic_pretrain"),
    ("reward.functions", "as reward.functions=[http://host:port/path] or [path/file.py:function]", "", "remote_rm_url"),
    ("data.train_files", "", "", "prompt_data"),
    ("data.prompt_key", "", "", "input_key"),
    ("data.prompt_is_chat", "true unless set to false", "", "apply_chat_template"),
    ("data.max_prompt_length", "", "", "prompt_max_len"),
    ("data.train_batch_size", "", "", "rollout_batch_size"),
    ("actor.ppo_micro_batch_size_per_gpu", "", "", "micro_train_batch_size"),
    ("critic.optim.lr", "", "", "critic_learning_rate"),
    ("actor.optim.lr_warmup_steps_ratio", "", "", "lr_warmup_ratio"),
    ("critic.cliprange_value", "", "", "value_clip"),
    ("algorithm.lam", "", "", "lambd"),
    ("algorithm.adv_estimator", "", "", "advantage_estimator"),
    ("trainer.critic_warmup", "the first step that trains the actor: add 1", "", "freezing_actor_steps"),
    ("trainer.n_gpus_per_node", "the number of engines is slots / rollout.tensor_model_parallel_size", "",
     "vllm_num_engines"),
    ("rollout.tensor_model_parallel_size", "", "", "vllm_tensor_parallel_size"),
    ("rollout.gpu_memory_utilization", "", "", "vllm_gpu_memory_utilization"),
)  # fmt: skip
"""(rlfuse key, note, names of TRL, names of OpenRLHF)."""
TRL = {name: (key, note) for key, note, names, _ in _TRL_AND_OPENRLHF for name in names.split()}
OPENRLHF = {name: (key, note) for key, note, _, names in _TRL_AND_OPENRLHF for name in names.split()}


def keys_of(table: Mapping[str, tuple[str, str]], names: str) -> dict[str, str]:
    """Return the rlfuse keys of these names, separated by spaces, from `TRL` or `OPENRLHF`."""
    return {name: table[name][0] for name in names.split()}


def counterpart(name: str, known: frozenset[str]) -> Counterpart | None:
    """Return the counterpart of a name of verl, TRL or OpenRLHF; None if it is unknown. `known`: the keys of rlfuse.

    verl's names may lack `actor_rollout_ref`.
    """
    leaf = name.rsplit(".", 1)[-1]
    of_verl = name.startswith(VERL_GROUPS)
    if name in VERL or (of_verl and leaf in VERL_LEAVES):
        key, note = VERL.get(name) or VERL_LEAVES[leaf]
        return Counterpart("verl", (key,) if key else (), note, VERL_VALUES.get(name, {}))
    for start, why in NO_COUNTERPART:
        if name == start or name.startswith((start + ".", start + "_")):
            return Counterpart("verl", (), why)
    if OVERLONG.search(name):
        return Counterpart("verl", ("reward.overlong_buffer.len",), "a value above 0 enables it; in verl `enable` does")
    for prefix, ours in VERL_PREFIXES:
        rest = name.removeprefix(prefix)
        free = ours == "rollout.engine_kwargs."
        if rest != name and (ours + rest in known or free):
            note = "one setting for actor and critic" if prefix.startswith("critic.") else ""
            return Counterpart("verl", (ours + rest,), note)
    if name.startswith("actor_rollout_ref.rollout.") and leaf in VLLM_OPTIONS:
        return Counterpart("verl", (f"rollout.engine_kwargs.{leaf}",))
    for word, why in NO_COUNTERPART_WORDS:
        if word in name and of_verl:
            return Counterpart("verl", (), why)
    for origin, table in (("TRL", TRL), ("OpenRLHF", OPENRLHF)):
        if name in table:
            return Counterpart(origin, (table[name][0],), table[name][1])
    return None if name.startswith(VERL_ROOT) else counterpart(f"{VERL_ROOT}{name}", known)


def key_for_verl_name(name: str, value: str, known: frozenset[str]) -> str | None:
    """Return the key for verl's `name` if it has the same meaning with this value; otherwise None."""
    found = None if name in known else counterpart(name, known)
    plain = found is not None and found.origin == "verl" and found.is_same and value.strip() not in found.values
    return found.keys[0] if plain else None


def is_verl_name(name: str, known: frozenset[str]) -> bool:
    """Return whether a name is a name of verl and not a key of rlfuse."""
    found = None if name in known else counterpart(name, known)
    return name.startswith(VERL_ROOT) or (found is not None and found.origin == "verl")


def other_meanings(given: Mapping[str, str], known: frozenset[str]) -> dict[str, str]:
    """Return a note per setting (name -> value as typed) that differs in verl; none unless a name of verl is given."""
    if not any(is_verl_name(name, known) for name in given):
        return {}
    return {
        name: f"{name}={given[name]}: differs from verl: {text}"
        for name, text in SAME_NAME.items()
        if given.get(name, "null") != "null"
    }
