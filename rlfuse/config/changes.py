"""Classify each configuration key by what a change means on resume, and list how two configurations differ. Pure.

Every schema key belongs to exactly one class, by its own name or its group's; tests report keys that belong to none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlfuse.config.documentation import as_typed, by_name
from rlfuse.config.own_functions import traits_of
from rlfuse.errors import ConfigError


class Effect(Enum):
    """What becomes of a change; the value is told to the user, of keys."""

    BESIDE = "take effect at once, beside the training"
    NEXT_STEP = "take effect from the next step on"
    EXPERIMENT = "take effect, but before and after are then no longer one experiment"
    FIXED = "can't change in a run"

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


_STATE = ("actor.strategy", "actor.zero_stage", "training.tensor_model_parallel_size")
_LAYOUT = (*_STATE, "training.pipeline_parallel_size", "trainer.nnodes", "trainer.n_gpus_per_node")
STATE = (*_STATE, "model.dtype", "video.freeze_tower")
"""Keys that decide how a checkpoint divides the states of whole models."""

TABLE: tuple[tuple[Effect, str, str], ...] = (
    (Effect.BESIDE, "names the run folder", "trainer.project_name trainer.experiment_name trainer.job_name "
     "trainer.default_local_dir"),
    (Effect.BESIDE, "where to go on from", "trainer.resume_mode"),
    (Effect.BESIDE, "what is logged, and when to call for a person", "trainer.logger trainer.wandb_mode "
     "trainer.metrics trainer.log_samples trainer.log_samples_freq trainer.log_val_generations trainer.timeline_freq "
     "video.log_clips alerts"),
    (Effect.BESIDE, "when to validate and to save", "trainer.val_before_train trainer.test_freq trainer.save_freq "
     "trainer.max_ckpt_to_keep trainer.preemption_grace_s"),
    (Effect.BESIDE, "memory, processes and time limits", "rollout.gpu_memory_utilization rollout.kv_cache_memory_mb "
     "rollout.free_cache_engine rollout.max_num_seqs rollout.scheduler rollout.weight_transfer rollout.kv_transfer "
     "rollout.update_weights_bucket_mb reward.engine_kwargs reward.device reward.batch_items reward.batch_age_s "
     "reward.num_workers reward.memory_mb reward.timeout_s video.encoder_ranks video.cache_mb video.disk_cache "
     "video.decode_workers video.prefetch_mb video.encode_ahead video.decode_timeout_s trainer.gc_freq cluster"),
    (Effect.BESIDE, "what the run puts up with", "rollout.on_mismatch reward.max_failure_rate video.max_failure_rate "
     "model.trust_remote_code"),
    (Effect.NEXT_STEP, "how long it trains", "trainer.total_epochs trainer.total_training_steps"),
    (Effect.NEXT_STEP, "how large the optimizer's steps are", "actor.optim critic.optim actor.grad_clip "
     "actor.grad_accum_dtype trainer.critic_warmup"),
    (Effect.NEXT_STEP, "weights and bounds in the loss", "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high "
     "actor.clip_ratio_c actor.entropy_coeff actor.kl_loss_coef critic.cliprange_value algorithm.kl_coef_by_source "
     "algorithm.rollout_is_threshold"),
    (Effect.NEXT_STEP, "a new coefficient is where the controller starts again", "algorithm.kl_ctrl"),
    (Effect.NEXT_STEP, "when and where work runs, never what is computed", "fusion.training fusion.policy "
     "fusion.credit_samples fusion.credit_mb rollout.disaggregate training.ulysses_sequence_parallel_size "
     "training.virtual_pipeline_model_parallel_size training.pipeline_placement "
     "training.vocabulary_parallel training.split_backward training.activation_memory "
     "rollout.tensor_model_parallel_size actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size_per_gpu "
     "model.use_remove_padding model.enable_gradient_checkpointing model.enable_activation_offload "
     "model.activation_device_mb model.activation_host_mb model.activation_disk_mb "
     "actor.optimizer_residency"),
    (Effect.NEXT_STEP, "the same numbers to rounding", "reward.model_backend trainer.deterministic "
     "actor.cuda_graphs"),
    (Effect.NEXT_STEP, "the same tokens in distribution only", "fusion.tail_speculation"),
    (Effect.EXPERIMENT, "other prompts, from the same count of batches on", "data.train_files data.media_root "
     "data.prompt_key data.prompt_is_chat data.apply_chat_template_kwargs data.truncation data.filter_overlong_prompts "
     "data.max_prompt_length"),
    (Effect.EXPERIMENT, "another order: some prompts of this epoch come twice, others not at all",
     "data.shuffle data.seed"),
    (Effect.EXPERIMENT, "another batch; the place in the data is counted in batches", "data.train_batch_size "
     "rollout.n fusion.data fusion.excess"),
    (Effect.EXPERIMENT, "another number of updates by a batch", "actor.ppo_mini_batch_size actor.ppo_epochs"),
    (Effect.EXPERIMENT, "responses are drawn otherwise", "data.max_response_length rollout.temperature rollout.top_p "
     "rollout.top_k rollout.min_p rollout.stop rollout.quantization rollout.engine_kwargs"),
    (Effect.EXPERIMENT, "held-out scores before and after can't be compared", "data.val_files rollout.val_kwargs"),
    (Effect.EXPERIMENT, "another reward: values before and after can't be compared", "reward.functions reward.weights "
     "reward.model_path reward.model_dtype reward.overlong_buffer"),
    (Effect.EXPERIMENT, "another advantage", "algorithm.adv_estimator algorithm.gamma algorithm.lam "
     "algorithm.norm_adv_by_std_in_grpo algorithm.filter_groups"),
    (Effect.EXPERIMENT, "another loss", "algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.old_log_probs "
     "actor.loss_mode actor.loss_agg_mode actor.use_kl_loss actor.kl_loss_type"),
    (Effect.EXPERIMENT, "another reference to stay near", "ref.path"),
    (Effect.EXPERIMENT, "the model sees other frames", "video.sampling video.max_tokens video.levels video.fps_general "
     "video.timestamps video.max_image_tokens video.fps_detail video.fps_motion video.task video.frames "
     "video.tokens_per_frame video.mm_processor_kwargs"),
    (Effect.FIXED, "weights are the checkpoint's", "model.path critic.path"),
    (Effect.FIXED, "what encodes clips, and where their tokens stand", "model.video_family"),
    (Effect.FIXED, "weights and optimizer state are kept so", "model.dtype actor.offload_optimizer"),
    (Effect.FIXED, "what is trained, and beside which engine", "trainer.task video.freeze_tower rollout.name"),
    (Effect.FIXED, "optimizer state is cut up so", " ".join(_LAYOUT)),
)  # fmt: skip
"""(effect, what it means, keys and groups of keys)."""

_BY_NAME = {name: (effect, reason) for effect, reason, names in TABLE for name in names.split()}
WHERE_VALUES_DECIDE = {
    **dict.fromkeys(_LAYOUT, (Effect.NEXT_STEP, "where work runs; the checkpoint can be loaded so")),
    "algorithm.adv_estimator": (Effect.FIXED, "with a critic or without: the checkpoint is of the other"),
}
"""What some changes of a key mean, by its value before and after, in place of the table's."""
_PATHS = ("data.train_files", "data.val_files", "data.media_root", "video.disk_cache", "trainer.default_local_dir")


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs."""

    key: str
    was: Any
    now: Any
    effect: Effect
    reason: str


def rule(key: str) -> tuple[Effect, str]:
    """The class of a key and what a change means; KeyError for one that the table lacks."""
    group = key
    while group not in _BY_NAME and "." in group:
        group = group.rpartition(".")[0]
    return _BY_NAME[group]


def rules(key: str) -> list[tuple[Effect, str]]:
    """All that a change of a key may mean, whichever values it had."""
    return [rule(key), *([WHERE_VALUES_DECIDE[key]] if key in WHERE_VALUES_DECIDE else [])]


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """List differences between two `config.yaml`s in the schema's order; a missing key has its default."""
    before, after = _settings(was), _settings(now)
    return [
        Change(key, before[key], value, *_judged(key, before, after))
        for key, value in after.items()
        if _same_place(key, before[key]) != _same_place(key, value)
    ]


def _judged(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Effect, str]:
    of_critic = key == "algorithm.adv_estimator" and _trains_critic(before[key]) != _trains_critic(after[key])
    return WHERE_VALUES_DECIDE[key] if of_critic or (key in _LAYOUT and _loads(before, after)) else rule(key)


def _trains_critic(estimator: str) -> bool:
    try:
        return traits_of(estimator).needs_critic
    except ConfigError:
        return False


def _loads(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether a trainer of one layout can load checkpoints of the other."""
    stages, width = "training.pipeline_parallel_size", "training.tensor_model_parallel_size"
    pipelines = min(before[stages], after[stages]) > 1
    if (before[width] != after[width] and not pipelines) or before["actor.strategy"] != after["actor.strategy"]:
        return False
    if len({state_layout(each)["actor.zero_stage"] for each in (before, after)}) > 1:
        return False
    slots = {each["trainer.nnodes"] * each["trainer.n_gpus_per_node"] for each in (before, after)}
    return pipelines or (before[stages] == after[stages] and len(slots) == 1)


def state_layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that are equal where checkpoints divide states alike: ZeRO 2 does as 1."""
    return {**settings, "actor.zero_stage": {2: 1}.get(settings["actor.zero_stage"], settings["actor.zero_stage"])}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, key in by_name().items():
        value: Any = config
        for part in name.split("."):
            value = value.get(part, key.default) if isinstance(value, Mapping) else key.default
        found[name] = value
    return found


def unfolded(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Full name -> value, down to what is no dictionary, or an empty one."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= unfolded(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found


def _same_place(key: str, value: Any) -> Any:
    if key not in _PATHS or not value:
        return value
    return [str(Path(path).absolute()) for path in value] if isinstance(value, list) else str(Path(value).absolute())


def abbreviated(value: Any) -> str:
    """A value for the table: as it is typed, without the middle of one that is longer than 60 characters."""
    text = " ".join(as_typed(value).split())
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
