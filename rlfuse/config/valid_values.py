"""Valid values of single keys: choices and ranges, used for checks, help, messages and the key reference."""

from __future__ import annotations

import math
import operator
from typing import Any

from rlfuse.config.estimators import in_words

_KL_ESTIMATORS = "k1 | kl (the same) | k2 | mse (the same) | k3 | low_var_kl (the same) | abs"
# A table, as OmegaConf takes no `Literal` as the type of a field.
_NAMED: dict[str, str] = {
    "data.truncation": "error | left (the end is kept) | right (the start is kept) | middle (both ends are kept)",
    "model.dtype": "float32 | bfloat16",
    "rollout.name": "vllm | transformers (CPUs; models that vLLM does not support)",
    "actor.strategy": "deepspeed (under zero_stage) | fsdp2 (PyTorch's fully_shard; CPUs)",
    "rollout.weight_transfer": "auto (ipc on GPUs unless training is pipelined, else shm) | shm | ipc",
    "rollout.quantization": "fp8_per_channel (CPUs; GPUs of compute capability 8.9 or more) | fp8_per_tensor (GPUs "
    "only) | fp8_per_block (GPUs only) | int8_per_channel_weight_only (experts alone; GPUs only)",
    "rollout.on_mismatch": "stop | alert",
    "rollout.kv_transfer": "auto (which is shm) | shm | nixl (CPU hosts only)",
    "rollout.scheduler": "fast (short path for decode steps, one message per sample) | vllm (its own)",
    "rollout.disaggregate": "auto (where the simulated step gains more than the measured costs may be wrong by) | off "
    "| on (two engines or more on one node)",
    "reward.model_backend": "hf (transformers) | vllm (its pooling)",
    "reward.model_dtype": "float32 | bfloat16 | float16",
    "reward.device": "auto (a share of a slot's GPU, where there are GPUs) | cpu | cuda",
    "algorithm.adv_estimator": in_words(),
    "algorithm.kl_penalty": _KL_ESTIMATORS,
    "algorithm.kl_ctrl.type": "fixed | adaptive (steered to target_kl; Ziegler et al. 2019)",
    "algorithm.old_log_probs": "trainer (one more forward pass, but for the first mini-batch of a step) | engine",
    "actor.grad_accum_dtype": "float32 | bfloat16 (half the memory and traffic; the sum of 256 micro-batches is then "
    "off by 2 %)",
    "actor.optimizer_residency": "training (comes and leaves with the weights) | forecast (comes beside passes and "
    "gradients, just in time for the first update as the step under way is foreseen) | step (there in each update "
    "alone: less memory, more copies)",
    "actor.cuda_graphs": "auto (small models whose micro-batches take longer to launch than to compute) | on | off",
    "actor.optim.lr_scheduler_type": "constant | cosine (0 in the step after the last)",
    "actor.loss_mode": "vanilla (per token) | gspo (per sequence)",
    "actor.loss_agg_mode": "token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm",
    "actor.kl_loss_type": _KL_ESTIMATORS,
    "fusion.training": "fused (in one pipeline schedule) | serial (one after the other)",
    "training.pipeline_placement": "v (there and back) | interleaved (round and round)",
    "fusion.policy": "serial | stream | rlhfuse | adaptive",
    "fusion.data": "exact | tail_batching (reordered) | over_sampling (off-policy) | partial_rollout (off-policy) | "
    "one_step_off (off-policy)",
    "video.sampling": "family (as many and as large as the model's own processor takes) | "
    "seed_vl (Seed1.5-VL: frames per second by task, the largest of `levels` that fits) | "
    "fixed (as many of as many tokens for every clip)",
    "video.timestamps": "family (as the model's own processor does: VideoLLaMA3 `Time 1.5s:`, Qwen3-VL "
    "`<1.5 seconds>`, Qwen2.5-VL not at all) | "
    "seed_vl (`[1.5 second]`)",
    "video.task": "general | detail | motion",
    "trainer.task": "rl (a policy, by reward) | reward_model (a classifier, by chosen / rejected rows, with `actor`'s "
    "settings)",
    "trainer.logger": "console | wandb | tensorboard",
    "trainer.wandb_mode": "offline | online | disabled",
    "cluster.device": "auto (GPUs where any node that Ray has has some, wherever the driver is; else CPUs) | cpu | "
    "cuda",
}
"""Keys with named values, and what these mean where the names do not say it; a list is judged entry by entry."""
CHOICES = {key: tuple(each.partition(" (")[0] for each in words.split(" | ")) for key, words in _NAMED.items()}
OWN = "path/file.py:name"
OPEN = ("algorithm.adv_estimator", "algorithm.kl_penalty", "actor.loss_mode", "actor.kl_loss_type", "fusion.policy")
"""Keys whose value may also be a function of the user's own."""
METRICS = "trainer.metrics"
FAMILY = "model.video_family"
VALUES = _NAMED | {key: f"{_NAMED[key]} | {OWN} (your own)" for key in OPEN}

WHY_NOT = {
    (
        "rollout.weight_transfer",
        "nccl",
    ): "NCCL refuses two ranks on one GPU, and a slot's engine and its rank share one",
    ("rollout.quantization", "fp8"): "vLLM means a checkpoint of 8 bits by it, and quantizes by names that say how",
}
"""(key, value) that other trainers know -> why there is none of it here."""

KEYS_BY_RANGE = {
    "1 or more": "data.max_prompt_length data.max_response_length data.train_batch_size rollout.n "
    "rollout.val_kwargs.n rollout.tensor_model_parallel_size rollout.kv_cache_memory_mb rollout.max_num_seqs "
    "reward.memory_mb rollout.update_weights_bucket_mb reward.num_workers algorithm.kl_ctrl.horizon "
    "actor.ppo_mini_batch_size reward.batch_items actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size_per_gpu "
    "actor.ppo_epochs trainer.nnodes trainer.n_gpus_per_node trainer.total_epochs trainer.total_training_steps "
    "trainer.max_ckpt_to_keep fusion.credit_samples training.pipeline_parallel_size "
    "training.virtual_pipeline_model_parallel_size training.tensor_model_parallel_size "
    "training.ulysses_sequence_parallel_size video.max_tokens video.frames video.tokens_per_frame "
    "video.max_image_tokens video.encoder_ranks video.cache_mb video.decode_workers",
    "0 or more": "data.seed rollout.val_kwargs.temperature reward.overlong_buffer.len trainer.critic_warmup "
    "reward.batch_age_s reward.overlong_buffer.penalty_factor algorithm.kl_ctrl.kl_coef "
    "algorithm.filter_groups.max_num_gen_batches actor.grad_clip actor.optim.lr actor.optim.weight_decay "
    "actor.entropy_coeff actor.kl_loss_coef critic.optim.lr trainer.log_samples "
    "trainer.log_val_generations trainer.gc_freq video.prefetch_mb "
    "model.activation_device_mb model.activation_host_mb model.activation_disk_mb "
    "fusion.tail_speculation video.log_clips cluster.max_restarts",
    "above 0": "rollout.temperature reward.timeout_s algorithm.kl_ctrl.target_kl algorithm.rollout_is_threshold "
    "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high critic.cliprange_value cluster.timeout_s "
    "fusion.credit_mb fusion.excess training.activation_memory video.fps_general video.fps_detail video.fps_motion "
    "video.decode_timeout_s alerts.ppo_kl alerts.kl alerts.log_probs_diff alerts.slow_worker_s "
    "trainer.preemption_grace_s "
    "cluster.heartbeat_s",
    "above 0 and 1 or less": "rollout.top_p rollout.val_kwargs.top_p rollout.gpu_memory_utilization "
    "alerts.reward_drop alerts.entropy_share",
    "0 or more and 1 or less": "rollout.min_p rollout.val_kwargs.min_p reward.max_failure_rate "
    "video.max_failure_rate actor.optim.lr_warmup_steps_ratio algorithm.gamma algorithm.lam "
    "alerts.zero_spread alerts.reward_failures alerts.idle_share",
    "0 or more and 3 or less": "actor.zero_stage",
    "above 1": "actor.clip_ratio_c alerts.grad_norm_factor",
    "-1 or 1 or more": "rollout.top_k rollout.val_kwargs.top_k",
    "-1 or 0 or more": "actor.optim.lr_warmup_steps trainer.test_freq trainer.save_freq trainer.timeline_freq "
    "trainer.log_samples_freq",
}
RANGES = {name: words for words, names in KEYS_BY_RANGE.items() for name in names.split()}
"""Valid values of numbers, in the words of the message; `in_range` reads the same words."""

COMPARISONS = (("above ", operator.gt), (" or more", operator.ge), (" or less", operator.le))


def names_function(value: object) -> bool:
    """Whether it is written as `OWN`."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return file.endswith(".py") and name.isidentifier()


def functions_named_by(config: Any) -> list[tuple[str, str]]:
    """Each function or class of the user's own that a job names beside its rewards, with the key that does."""
    chosen = [(key, operator.attrgetter(key)(config)) for key in OPEN]
    alone = [(METRICS, each) for each in config.trainer.metrics] + [(FAMILY, config.model.video_family)]
    return [*((key, value) for key, value in chosen if names_function(value)), *(each for each in alone if each[1])]


def in_range(value: float, words: str) -> bool:
    """Whether `value` satisfies a phrase of RANGES."""
    if not math.isfinite(value):
        return False
    if words.startswith("-1 or "):
        return value == -1 or in_range(value, words.removeprefix("-1 or "))
    for part in words.split(" and "):
        mark, compare = next((m, c) for m, c in COMPARISONS if m in part)
        if not compare(value, float(part.replace(mark, ""))):
            return False
    return True
