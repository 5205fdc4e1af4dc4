"""Settings of verl, TRL and OpenRLHF that change what is trained and have no equivalent in rlfuse, with the reason.

A translated job leaves a key open for each of them. A name that is a key of rlfuse, or has one as its counterpart,
needs no row: the schema decides. Rows with `values` explain single values that a key of rlfuse does not accept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LORA = "LoRA is not supported, so that all weights would be trained"
MULTI_TURN = "jobs are single-turn, without tools"
MODEL, TASK, DATA, REWARD = "model.path", "trainer.task", "data.train_files", "reward.functions"


@dataclass(frozen=True, slots=True)
class Undecided:
    """One setting without an equivalent. `name`: of the setting, or of a group of settings; `key`: left open for it."""

    name: str
    key: str
    why: str
    off: tuple[Any, ...] = ()
    """Values without effect, in addition to null, false, 0 and empty ones."""
    values: tuple[Any, ...] = ()
    """Values that the row explains; empty: all but `off`."""

    def applies(self, value: Any) -> bool:
        """Return whether the setting changes what is trained."""
        if self.values:
            return _is_one_of(value, self.values)
        return bool(value) and not _is_one_of(value, self.off)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is one of these; true is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _rows(key: str, why: str, names: str, off: tuple[Any, ...] = ()) -> tuple[Undecided, ...]:
    return tuple(Undecided(name, key, why, off) for name in names.split())


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_OPTIMIZER = "rlfuse trains with AdamW"

VERL = (
    *_rows(MODEL, LORA, f"{_MODEL}.lora_rank {_MODEL}.lora.rank {_MODEL}.lora_adapter_path "
           f"{_MODEL}.lora.adapter_path", (-1,)),
    *_rows("critic.path", LORA, "critic.model.lora_rank critic.model.lora.rank critic.model.lora_adapter_path "
           "critic.model.lora.adapter_path", (-1,)),
    *_rows(MODEL, "edit config.json of the model instead", f"{_MODEL}.override_config"),
    *_rows(MODEL, "the tokenizer is that of the model", "data.tokenizer"),
    *_rows(MODEL, "the routing of experts is not replayed", f"{_ACTOR}.router_replay.mode", ("disabled",)),
    *_rows("rollout.name", MULTI_TURN,
           f"{_ROLLOUT}.multi_turn.enable {_ROLLOUT}.multi_turn.tool_config_path "
           f"{_ROLLOUT}.multi_turn.function_tool_path {_ROLLOUT}.multi_turn.interaction_config_path "
           f"{_ROLLOUT}.agent.default_agent_loop {_ROLLOUT}.agent.agent_loop_config_path", ("single_turn_agent",)),
    *_rows("data.max_response_length", "responses end at the end-of-sequence token", f"{_ROLLOUT}.ignore_eos"),
    *_rows("actor.optim.lr", _OPTIMIZER, f"{_ACTOR}.optim.optimizer {_ACTOR}.optim.optimizer_impl "
           f"{_ACTOR}.optim.override_optimizer_config", ("AdamW", "torch.optim")),
    *_rows("critic.optim.lr", _OPTIMIZER, "critic.optim.optimizer critic.optim.optimizer_impl "
           "critic.optim.override_optimizer_config", ("AdamW", "torch.optim")),
    *_rows("actor.optim.lr_scheduler_type", "the schedule has no such setting",
           f"{_ACTOR}.optim.num_cycles", (0.5,)),
    *_rows("critic.optim.lr_scheduler_type", "the schedule has no such setting",
           "critic.optim.num_cycles", (0.5,)),
    *_rows("actor.loss_agg_mode", "critic and actor share the aggregation", "critic.loss_agg_mode"),
    *_rows("actor.loss_mode", "rlfuse has no such loss", f"{_ACTOR}.policy_loss"),
    *_rows(f"{_CORRECTION}.rollout_is", "the correction has no such setting",
           f"{_CORRECTION} algorithm.rollout_is_batch_normalize", ("ppo_clip", "null")),
    *_rows("algorithm.adv_estimator", "samples are not reweighted by their rewards", "algorithm.use_pf_ppo"),
    *_rows(DATA, "rows are read by rlfuse", "data.custom_cls.path data.datagen.path data.sampler.class_path"),
    *_rows(DATA, "all rows are used; write a file with the first of them", "data.train_max_samples", (-1,)),
    *_rows(DATA, "the column is always images", "data.image_key", ("images",)),
    *_rows(DATA, "the column is always videos", "data.video_key", ("videos",)),
    *_rows(REWARD, "the column is always data_source", "data.reward_fn_key", ("data_source",)),
    *_rows(REWARD, "reward functions are called for every sample, without a manager",
           "reward_model.reward_manager reward.reward_manager.name reward.reward_manager.module.path "
           "reward_model.reward_loop_class_name",
           ("naive", "dapo", "prime", "batch", "rate_limited")),
    *_rows(TASK, "the command only validates; use `rlfuse eval`", "trainer.val_only"),
    Undecided("algorithm.adv_estimator", "", "advantage only for the best response of a group", (), ("grpo_passk",)),
    Undecided("algorithm.adv_estimator", "", "it needs the variance of token gradients", (),
              ("optimal_token_baseline", "tir_optimal_token_baseline")),
    Undecided("actor.loss_mode", "", "geometric mean of the ratios (GMPO)", (), ("geo_mean",)),
    Undecided("actor.loss_mode", "", "trust region on the divergence of the policies", (), ("dppo_tv", "dppo_kl")),
)  # fmt: skip

TRL = (
    *_rows(MODEL, LORA, "use_peft lora_task_type"),
    *_rows(MODEL, "training with 4 or 8 bits is not supported", "load_in_4bit load_in_8bit"),
    *_rows(MODEL, "the end-of-sequence token is that of the tokenizer", "eos_token"),
    *_rows(MODEL, "rlfuse loads the default revision", "model_revision", ("main",)),
    *_rows(MODEL, "the weights are loaded without these arguments", "model_init_kwargs"),
    *_rows(MODEL, "the routers of experts have no auxiliary loss", "router_aux_loss_coef"),
    *_rows("actor.optim.lr", _OPTIMIZER, "optim optim_args optim_target_modules",
           ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused", "adamw_hf")),
    Undecided("average_tokens_across_devices", "actor.loss_agg_mode", "tokens are averaged over the whole mini-batch",
              (), (False,)),
    *_rows("actor.loss_mode", "rlfuse has no such loss setting",
           "top_entropy_quantile use_adaptive_entropy off_policy_mask_threshold", (1.0,)),
    *_rows("rollout.temperature", "rollout has no such sampling parameter",
           "repetition_penalty generation_kwargs vllm_structured_outputs_regex", (1.0,)),
    *_rows("algorithm.norm_adv_by_std_in_grpo", "advantages are not normalised over the batch",
           "normalize_advantages"),
    *_rows(REWARD, "set clip in the entries of reward.functions", "reward_clip_range"),
    *_rows(REWARD, "rewards have no penalty for a missing end of sequence", "missing_eos_penalty"),
    *_rows(REWARD, "rewards are not whitened", "whiten_rewards"),
    *_rows(DATA, "the script reads a part of a dataset; write a file",
           "dataset_config dataset_configs datasets", ("default", "main")),
    *_rows(DATA, "add it to the prompts of the file", "system_prompt"),
    *_rows("rollout.name", MULTI_TURN, "max_tool_calling_iterations tools environment_factory"),
    *_rows(TASK, "label smoothing and noise are not supported", "label_smoothing_factor neftune_noise_alpha"),
    *_rows("trainer.resume_mode", "checkpoints of TRL cannot be resumed", "resume_from_checkpoint"),
    *_rows("data.train_batch_size", "the batch has packed sequences, in rlfuse rows", "packing"),
    *_rows("data.shuffle", "rows are shuffled, or used in their order", "train_sampling_strategy", ("random",)),
    *_rows(TASK, "sequences are never concatenated over their ends", "packing_strategy", ("bfd",)),
    *_rows(TASK, "the loss of pairs has no such setting",
           "label_smoothing loss_weights ld_alpha use_weighting center_rewards_coefficient"),
    *_rows(TASK, "reverse KL only", "f_divergence_type", ("reverse_kl",)),
    Undecided("actor.loss_mode", "", "sequence-level weights with a soft gate", (), ("vespo",)),
    Undecided("actor.loss_mode", "", "GSPO with each sequence weighted by its length", (), ("luspo",)),
    Undecided("actor.loss_agg_mode", "", "its mean is over the tokens of one micro-batch", (), ("bnpo",)),
    Undecided("trainer.task", "", "policy and value share an optimizer; start from algorithm=ppo", (),
              ("ppo",)),
    Undecided("trainer.task", "", "rlfuse has no such trainer", (),
              ("kto", "orpo", "cpo", "bco", "online_dpo", "nash_md", "xpo", "prm")),
    Undecided("trainer.task", "", "start from algorithm=distill", (), ("gkd", "distillation")),
)  # fmt: skip

OPENRLHF = (
    *_rows(MODEL, LORA, "lora_rank"),
    *_rows(MODEL, "training with 4 bits is not supported", "load_in_4bit"),
    *_rows(MODEL, "EMA weights are not kept", "enable_ema"),
    *_rows(MODEL, "the routers of experts have no auxiliary loss", "aux_loss_coef"),
    *_rows("rollout.name", MULTI_TURN, "agent_func_path"),
    *_rows(REWARD, "the mean and deviation stored in an OpenRLHF reward model are not used", "normalize_reward"),
    *_rows("algorithm.adv_estimator", "advantages are always divided by the standard deviation",
           "no_advantage_std_norm"),
    *_rows("algorithm.filter_groups.enable", "groups are dropped if their rewards are equal",
           "dynamic_filtering_reward_range", ([0, 1], [0.0, 1.0], [0, 1.0])),
    *_rows(DATA, "the prompt is used as it is", "input_template"),
    *_rows(DATA, "rename the column of labels to ground_truth, answer or solution", "label_key",
           ("ground_truth", "answer", "solution")),
    *_rows(DATA, "all rows of the files are used; list those of the split", "prompt_split", ("train",)),
    *_rows(DATA, "datasets are not mixed by probabilities", "prompt_data_probs dataset_probs"),
    *_rows("fusion.data", "fusion=one_step_off is closest", "async_train partial_rollout"),
)  # fmt: skip

UNDECIDED = {"verl": VERL, "TRL": TRL, "OpenRLHF": OPENRLHF}
"""Framework -> its settings and values without an equal."""
