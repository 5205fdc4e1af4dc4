"""Configuration schema of a run: typed groups of keys with verl's leaf names. The only declaration of each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rlfuse.config.custom_functions import traits_of
from rlfuse.config.declare import (
    ADVANTAGE,
    BATCH,
    ESTIMATOR,
    KL_CONTROL,
    LOSS,
    LOSS_WEIGHTS,
    OPTIMIZER,
    ORDER,
    PROMPTS,
    RESOURCES,
    ROUNDING,
    SAMPLING,
    SCHEDULING,
    STORED,
    UPDATES,
    VALIDATION,
    WEIGHTS,
    Effect,
    KeyGroup,
    Resume,
    key,
)
from rlfuse.config.estimators import describe_choices
from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.rewards import RewardConfig
from rlfuse.config.rollout import RolloutConfig
from rlfuse.config.trainer import AlertsConfig, TrainerConfig
from rlfuse.config.video import VideoConfig

_KL_ESTIMATORS = "k1 | kl (same as k1) | k2 | mse (same as k2) | k3 | low_var_kl (same as k3) | abs"


@dataclass
class DataConfig(KeyGroup):
    """Training and validation data: files, columns, lengths, order."""

    train_files: list[str] = key(MISSING, PROMPTS, is_path=True, accepts_entry=True)
    """Training files: Parquet, JSON, JSONL, CSV, or Hugging Face dataset folders, in the row format of verl or TRL."""
    val_files: list[str] = key([], VALIDATION, is_path=True, accepts_entry=True)
    """Validation files, in the same formats as train_files; empty disables validation."""
    media_root: str | None = key(None, PROMPTS, is_path=True)
    """Root folder of clips and images: relative paths start there, and paths outside it are rejected (after resolving
    symbolic links). null: any file is allowed, and relative paths start at the data file. Set it for untrusted data."""
    prompt_key: str = key("prompt", PROMPTS)
    """Column of the prompt, which is a string or a list of chat messages."""
    prompt_is_chat: bool = key(True, PROMPTS)
    """Treat a string prompt as a user message and apply the chat template; false: use the string as the raw prompt."""
    apply_chat_template_kwargs: dict[str, Any] = key({}, PROMPTS)
    """Extra arguments of the tokenizer's chat template, for example enable_thinking."""
    max_prompt_length: int = key(512, PROMPTS, unit="tokens", at_least=1)
    """Maximum prompt length, including the chat template."""
    max_response_length: int = key(512, SAMPLING, unit="tokens", at_least=1)
    """Maximum response length."""
    train_batch_size: int = key(64, BATCH, at_least=1)
    """Prompts per training step; a step has train_batch_size * rollout.n samples."""
    truncation: str = key(
        "error", PROMPTS, choices="error | left (keep the end) | right (keep the start) | middle (keep both ends)"
    )
    """Handling of prompts longer than max_prompt_length; clips and images are never truncated."""
    filter_overlong_prompts: bool = key(False, PROMPTS)
    """Drop prompts longer than max_prompt_length (including clips) at loading and log the number, instead of applying
    `truncation`."""
    shuffle: bool = key(True, ORDER)
    """Shuffle the rows in every epoch, deterministically from `seed`."""
    seed: int = key(1, ORDER, at_least=0)
    """Random seed of the run: data order, sampling, and initialization of the critic's head."""
    sampler: str | None = key(None, ORDER, custom=True)
    """Custom data order, for example a curriculum: a class, as `path/file.py:name`; null: the order of `shuffle`."""
    sampler_kwargs: dict[str, Any] = key({}, ORDER)
    """Additional arguments of the sampler, by name."""


@dataclass
class ModelConfig(KeyGroup):
    """The policy model. Actor, reference and critic start from it, unless ref.path or critic.path is set."""

    path: str = key(MISSING, WEIGHTS)
    """Model folder in Hugging Face format, or hub name."""
    dtype: str = key("bfloat16", STORED, choices="float32 | bfloat16")
    """Data type of the weights in training and in the rollout engines."""
    trust_remote_code: bool = key(False, Resume(Effect.IMMEDIATE, "permission to run the model's code"))
    """Allow executing the modelling code that ships with the model."""
    video_family: str | None = key(
        None, Resume(Effect.FIXED, "encoding of clips and placement of their tokens"), custom=True
    )
    """Custom video model family: a class, as `path/file.py:name`; null: the built-in families of
    rlfuse/video/models."""
    use_remove_padding: bool = key(True, SCHEDULING)
    """Pack sequences instead of padding them (remove-padding); unsupported architectures are padded, which is
    logged."""
    enable_gradient_checkpointing: bool = key(False, SCHEDULING)
    """Recompute activations in the backward pass: less memory, about a third more compute time."""
    enable_activation_offload: bool = key(False, SCHEDULING)
    """Offload or recompute activations beyond activation_device_mb, whichever is faster. Results are identical, and
    micro-batches within the limit are unaffected."""
    activation_device_mb: int = key(2048, SCHEDULING, unit="MiB", at_least=0)
    """Maximum activation memory on the device between the forward and the backward pass
    (enable_activation_offload=true)."""
    activation_host_mb: int | None = key(None, SCHEDULING, unit="MiB", at_least=0)
    """Pinned host memory per rank for offloaded activations (GPUs); null: the rank's share of a quarter of the node's
    free memory."""
    activation_disk_mb: int = key(0, SCHEDULING, unit="MiB", at_least=0)
    """Disk space per rank for offloaded activations, below trainer.default_local_dir; every such micro-batch writes
    its own data."""


@dataclass
class KlCtrl(KeyGroup):
    """KL controller: the coefficient of the KL penalty in the reward."""

    type: str = key("fixed", KL_CONTROL, choices="fixed | adaptive (towards target_kl; Ziegler et al. 2019)")
    """Type of the KL controller."""
    kl_coef: float = key(0.001, KL_CONTROL, at_least=0)
    """KL coefficient; with the adaptive controller, its initial value."""
    target_kl: float = key(0.1, KL_CONTROL, above=0)
    """Target KL per token of the adaptive controller (mean over each response, then over responses)."""
    horizon: int = key(10000, KL_CONTROL, at_least=1)
    """Horizon of the adaptive controller, in samples."""


@dataclass
class FilterGroups(KeyGroup):
    """Dynamic sampling (DAPO): replace groups whose rewards are all equal by groups of new prompts."""

    enable: bool = key(False, ADVANTAGE)
    """Train only on groups with unequal rewards; generate until a step has data.train_batch_size of them."""
    max_num_gen_batches: int = key(0, ADVANTAGE, at_least=0)
    """Maximum number of prompt batches generated per step; the run stops if they do not yield enough groups. 0: no
    limit."""


@dataclass
class RolloutCorrection(KeyGroup):
    """Correction of the mismatch between the log-probs of rollout engines and trainer (TIS, MIS, IcePop), by factors of
    the policy loss."""

    rollout_is: str | None = key(
        None, LOSS_WEIGHTS, choices="token (ratio of each token) | sequence (product over the response)"
    )
    """Importance weight: probability under the trainer over that under the engine; null: none."""
    rollout_is_threshold: float = key(2.0, LOSS_WEIGHTS, above=0)
    """Upper bound of the importance weight; larger ones are truncated to it."""
    rollout_is_threshold_lower: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Lower bound of the importance weight (IcePop): weights below it or above rollout_is_threshold become 0; null: no
    lower bound, and truncation."""
    rollout_rs: str | None = key(
        None,
        LOSS_WEIGHTS,
        choices="token_k1 | token_k2 | token_k3 | seq_sum_k1 | seq_sum_k2 | seq_sum_k3 | "
        "seq_mean_k1 (geometric mean) | seq_mean_k2 | seq_mean_k3 | seq_max_k2 | seq_max_k3",
    )
    """Rejection of tokens or responses whose KL estimate (k1, k2 or k3 per token; sum, mean or maximum over the
    response) is out of bounds: they get no policy gradient, but count in the loss divisor. null: none."""
    rollout_rs_threshold: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Upper bound of the estimate; for k1, of the ratio exp(k1), engine over trainer."""
    rollout_rs_threshold_lower: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Lower bound of the ratio, for k1 only; null: 1 / rollout_rs_threshold."""

    @property
    def is_enabled(self) -> bool:
        return self.rollout_is is not None or self.rollout_rs is not None


@dataclass
class AlgorithmConfig(KeyGroup):
    """Advantage estimation and KL penalties. Presets: algorithm=ppo | grpo | dr_grpo | gdpo | gpg | opo |
    remax | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | dapo | gspo | cispo | sapo | clip_cov |
    kl_cov | distill."""

    adv_estimator: str = key("gae", ESTIMATOR, choices=describe_choices(), custom=True)
    """Advantage estimator."""
    adv_estimator_kwargs: dict[str, Any] = key({}, ADVANTAGE)
    """Additional arguments of a custom estimator, by name."""
    gamma: float = key(1.0, ADVANTAGE, at_least=0, at_most=1)
    """Discount factor per token."""
    lam: float = key(1.0, ADVANTAGE, at_least=0, at_most=1)
    """Lambda of GAE."""
    norm_adv_by_std_in_grpo: bool = key(True, ADVANTAGE)
    """Divide group advantages by the group's standard deviation; false: do not (Dr. GRPO)."""
    use_kl_in_reward: bool = key(False, LOSS)
    """Subtract the KL penalty to the reference policy from the per-token reward."""
    kl_penalty: str = key("k1", LOSS, choices=_KL_ESTIMATORS, custom=True)
    """KL estimator of the penalty in the reward."""
    kl_penalty_kwargs: dict[str, Any] = key({}, LOSS)
    """Additional arguments of a custom kl_penalty, by name."""
    kl_ctrl: KlCtrl = field(default_factory=KlCtrl)
    kl_coef_by_source: dict[str, float] = key({}, LOSS_WEIGHTS)
    """KL coefficient per data_source (or pattern with `*`), which replaces both kl_ctrl.kl_coef and actor.kl_loss_coef;
    the first match applies."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    old_log_probs: str = key(
        "trainer", LOSS, choices="trainer (extra forward pass, except for the first update) | engine"
    )
    """Source of the old log-probs in PPO's importance ratio."""
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)


@dataclass
class OptimConfig(KeyGroup):
    """AdamW and its learning-rate schedule, which advances once per training step that trains the model, as in verl."""

    lr: float = key(1e-6, OPTIMIZER, at_least=0)
    """Learning rate after warmup."""
    weight_decay: float = key(0.01, OPTIMIZER, at_least=0)
    """Decoupled weight decay."""
    betas: list[float] = key([0.9, 0.999], OPTIMIZER)
    """Decay rates of AdamW's two moment estimates, each 0 or more and below 1."""
    eps: float = key(1e-8, OPTIMIZER, above=0)
    """Term that AdamW adds to the denominator for numerical stability."""
    lr_warmup_steps: int = key(-1, OPTIMIZER, at_least=0, or_minus_one=True)
    """Training steps of linear warmup; the first step has rate 0. -1 or 0: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = key(0.0, OPTIMIZER, at_least=0, at_most=1)
    """Warmup steps as a fraction of all training steps."""
    lr_scheduler_type: str = key(
        "constant",
        OPTIMIZER,
        choices="constant | linear | cosine | wsd (warmup, stable, decay: constant, then a cosine)",
    )
    """Learning-rate schedule after warmup. A decay would reach min_lr_ratio one step after the last."""
    min_lr_ratio: float = key(0.0, OPTIMIZER, at_least=0, at_most=1)
    """Final learning rate of a decay, as a fraction of `lr`; no effect with constant."""
    lr_wsd_decay_steps: int | None = key(None, OPTIMIZER, unit="steps", at_least=1)
    """lr_scheduler_type=wsd: training steps of the decay, at most those after warmup; null: a tenth of these."""

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of AdamW at the full learning rate."""
        return {"lr": self.lr, "weight_decay": self.weight_decay, "betas": tuple(self.betas), "eps": self.eps}


@dataclass
class ActorConfig(KeyGroup):
    """Policy updates, and the trainer backend of actor, critic and reference."""

    strategy: str = key("deepspeed", SCHEDULING, choices="deepspeed (by zero_stage) | fsdp2 (fully_shard; CPUs)")
    """Trainer backend."""
    zero_stage: int = key(1, SCHEDULING, at_least=0, at_most=3)
    """ZeRO stage of DeepSpeed."""
    offload_optimizer: bool = key(False, STORED)
    """Keep the optimizer state in host memory (ZeRO 1-3, GPUs)."""
    optimizer_residency: str = key(
        "training",
        SCHEDULING,
        choices="training (whenever the weights are) | forecast (loaded just in time for the predicted first update) | "
        "step (only during each update: less memory, more copies)",
    )
    """When the optimizer state is on the device (GPUs); never during generation."""
    grad_accum_dtype: str = key(
        "float32", OPTIMIZER, choices="float32 | bfloat16 (half the memory; error of 2 % over 256 micro-batches)"
    )
    """Data type for accumulating the gradients of bfloat16 weights."""
    cuda_graphs: str = key("auto", ROUNDING, choices="auto (small models limited by kernel launches) | on | off")
    """Capture passes over micro-batches of up to 2048 tokens as CUDA graphs (GPUs)."""
    grad_clip: float = key(1.0, OPTIMIZER, at_least=0)
    """Maximum global gradient norm; 0: no clipping. Updates with a non-finite norm are always skipped."""
    ppo_max_token_len_per_gpu: int = key(16384, SCHEDULING, unit="tokens", at_least=1)
    """Maximum tokens per micro-batch and rank; a longer sequence forms a separate micro-batch."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, SCHEDULING, at_least=1)
    """Maximum sequences per micro-batch and rank; null: limited only by ppo_max_token_len_per_gpu."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = key(64, UPDATES, at_least=1)
    """Prompts per optimizer step; must divide data.train_batch_size."""
    ppo_epochs: int = key(1, UPDATES, at_least=1)
    """Number of passes over the samples of a step."""
    clip_ratio: float = key(0.2, LOSS_WEIGHTS, above=0)
    """PPO clip range, for both sides unless clip_ratio_low or clip_ratio_high is set."""
    clip_ratio_low: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Lower clip range (DAPO); null: clip_ratio."""
    clip_ratio_high: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Upper clip range (DAPO); null: clip_ratio."""
    clip_ratio_c: float | None = key(3.0, LOSS_WEIGHTS, above=1)
    """Lower bound of dual-clip PPO for negative advantages (Ye et al. 2020); null disables it."""
    loss_mode: str = key(
        "vanilla",
        LOSS,
        choices="vanilla (per token) | gspo (per sequence) | cispo (clipped weights) | sapo (soft gate) | "
        "gpg (no ratio) | clip_cov (no gradient on tokens of high covariance) | kl_cov (KL penalty on them)",
        custom=True,
    )
    """Policy loss."""
    loss_mode_kwargs: dict[str, Any] = key({}, LOSS_WEIGHTS)
    """Additional arguments of a custom loss, by name."""
    tau_pos: float = key(1.0, LOSS_WEIGHTS, above=0)
    """loss_mode=sapo: temperature of the gate for positive advantages; larger values decay faster."""
    tau_neg: float = key(1.05, LOSS_WEIGHTS, above=0)
    """loss_mode=sapo: temperature of the gate for all other advantages."""
    clip_cov_ratio: float = key(0.0002, LOSS_WEIGHTS, above=0, at_most=1)
    """loss_mode=clip_cov: fraction of a step's tokens in the loss without a gradient."""
    clip_cov_lb: float = key(1.0, LOSS_WEIGHTS, at_least=0)
    """loss_mode=clip_cov: lower bound of the covariance of these tokens."""
    clip_cov_ub: float = key(5.0, LOSS_WEIGHTS, above=0)
    """loss_mode=clip_cov: upper bound of the covariance of these tokens."""
    kl_cov_ratio: float = key(0.0002, LOSS_WEIGHTS, above=0, at_most=1)
    """loss_mode=kl_cov: fraction of a step's tokens in the loss with a KL penalty, those of highest covariance."""
    ppo_kl_coef: float = key(0.1, LOSS_WEIGHTS, at_least=0)
    """loss_mode=kl_cov: coefficient of the KL penalty to the old policy."""
    loss_agg_mode: str = key(
        "token-mean", LOSS, choices="token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm"
    )
    """Aggregation of the token losses of a batch."""
    mask_truncated_completions: bool = key(False, LOSS)
    """Leave responses that reach data.max_response_length out of the policy loss and its mean (overlong filtering of
    DAPO). They still count in advantages, rewards and the critic's loss."""
    entropy_coeff: float = key(0.0, LOSS_WEIGHTS, at_least=0)
    """Coefficient of the entropy bonus."""
    use_kl_loss: bool = key(False, LOSS)
    """Add a KL loss to the reference policy."""
    kl_loss_coef: float = key(0.001, LOSS_WEIGHTS, at_least=0)
    """Coefficient of the KL loss."""
    kl_loss_type: str = key("k3", LOSS, choices=_KL_ESTIMATORS, custom=True)
    """KL estimator of the loss."""
    kl_loss_type_kwargs: dict[str, Any] = key({}, LOSS_WEIGHTS)
    """Additional arguments of a custom kl_loss_type, by name."""
    skip_zero_advantage: str = key(
        "auto", ROUNDING, choices="auto (unless a KL loss, an entropy bonus or a custom loss adds terms) | false"
    )
    """Skip the actor's passes over responses whose loss and gradient are 0, as every advantage is 0 or no token is in
    the loss. They still count in the denominator of the loss, so updates are the same."""

    def __post_init__(self) -> None:
        if self.skip_zero_advantage == "False":  # OmegaConf's text of the YAML value false
            self.skip_zero_advantage = "false"


@dataclass
class CriticOptim(OptimConfig):
    """The critic's optimizer and learning-rate schedule, independent of the actor's."""

    lr: float = key(1e-5, OPTIMIZER, at_least=0)
    """Learning rate of the critic after warmup."""


@dataclass
class CriticConfig(KeyGroup):
    """The value model, for advantage estimators that need one, such as gae. Settings not listed here are those of
    `actor`."""

    path: str | None = key(None, WEIGHTS)
    """Initial weights, of any model family; null: model.path. Its value head (`score`, or the names used by TRL and
    verl) is loaded if present; otherwise the head is initialized to 0."""
    cliprange_value: float = key(0.5, LOSS_WEIGHTS, above=0)
    """Clip range of the value function loss."""
    optim: CriticOptim = field(default_factory=CriticOptim)


@dataclass
class DpoConfig(KeyGroup):
    """Direct preference optimisation (trainer.task=dpo; Rafailov et al. 2023), with TRL's names."""

    beta: float = key(0.1, LOSS_WEIGHTS, above=0)
    """Strength of the implicit KL penalty to the reference policy; for ipo, the regularisation parameter tau."""
    loss_type: str = key("sigmoid", LOSS, choices="sigmoid (DPO) | ipo (Azar et al. 2023)")
    """Loss of a pair."""


@dataclass
class RefConfig(KeyGroup):
    """The reference policy, loaded only if a KL penalty, a KL loss, distillation or trainer.task=dpo uses it; frozen
    unless sync_ref_model is set. With algorithm=distill it is the teacher."""

    path: str | None = key(None, Resume(Effect.EXPERIMENT, "another reference policy"))
    """Weights of the reference policy, of any size and family with the same vocabulary; null: model.path. With
    sync_ref_model a resumed run continues with those of the checkpoint."""
    sync_ref_model: bool = key(False, Resume(Effect.FIXED, "checkpoints have the synchronized reference policy"))
    """Update the reference policy towards the actor during training (TR-DPO, arXiv 2404.09656), at the end of every
    ref_model_sync_steps-th step."""
    ref_model_sync_steps: int = key(512, LOSS_WEIGHTS, unit="steps", at_least=1)
    """Training steps between updates of the reference policy (sync_ref_model=true)."""
    ref_model_mixup_alpha: float = key(0.6, LOSS_WEIGHTS, above=0, at_most=1)
    """Share of the actor's weights in the updated reference policy; the rest is the previous reference. 1 copies the
    actor."""

    def is_sync_due(self, step: int) -> bool:
        """Return whether the reference policy is updated at the end of this training step."""
        return self.sync_ref_model and step % self.ref_model_sync_steps == 0


@dataclass
class TrainingConfig(KeyGroup):
    """Parallelism of actor, critic and reference."""

    pipeline_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Number of pipeline stages; must divide the slots, and the rest is data parallelism. 1: no pipeline
    parallelism."""
    virtual_pipeline_model_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Virtual pipeline stages per device: more stages shorten the bubbles but need more transfers."""
    pipeline_placement: str = key("v", SCHEDULING, choices="v (V-shaped) | interleaved")
    """Placement of virtual stages on the devices of a pipeline."""
    vocabulary_parallel: bool = key(False, SCHEDULING)
    """Shard the output heads of actor and reference by vocabulary over all devices of a pipeline, so that a large
    vocabulary does not slow down the last stage."""
    tensor_model_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Tensor-parallel size of actor, critic and reference; can be combined with pipeline parallelism. 1: no tensor
    parallelism."""
    ulysses_sequence_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Maximum Ulysses sequence-parallel size, a power of two; the size used for a micro-batch depends on its lengths.
    1: no sequence parallelism."""
    split_backward: bool = key(False, SCHEDULING)
    """Compute weight gradients separately from input gradients, to fill pipeline bubbles (zero-bubble schedules)."""
    activation_memory: float | None = key(1.5, SCHEDULING, above=0)
    """Maximum activation memory of a pipeline device, relative to serial 1F1B; null: no limit."""


@dataclass
class FusionConfig(KeyGroup):
    """Scheduling of generation, scoring and training. Only `data` values other than exact change the training
    samples."""

    training: str = key("fused", SCHEDULING, choices="fused (in one pipeline schedule) | serial")
    """Execution of actor, critic and passes of later mini-batches with pipeline_parallel_size > 1."""
    policy: str = key("adaptive", SCHEDULING, choices="serial | stream | rlhfuse | adaptive", custom=True)
    """Scheduling policy; all policies are exact: they do not change the samples trained on."""
    policy_kwargs: dict[str, Any] = key({}, SCHEDULING)
    """Additional arguments of a custom policy, by name."""
    data: str = key(
        "exact",
        BATCH,
        choices="exact | tail_batching (reordered) | over_sampling (off-policy) | partial_rollout (off-policy) | "
        "one_step_off (off-policy)",
    )
    """Selection of the samples that a step trains on."""
    excess: float = key(0.25, BATCH, above=0)
    """Additional prompts per step, as a fraction of the batch (tail_batching, over_sampling, partial_rollout)."""
    tail_speculation: int = key(0, ROUNDING, at_least=0)
    """Speculative decoding while at most this many samples are decoding, with drafts from rollout.draft, which change
    tokens only by rounding. 0 disables it."""
    credit_samples: int | None = key(None, SCHEDULING, at_least=1)
    """Maximum number of finished samples waiting to be scored before generation pauses; null: all samples of a step."""
    credit_mb: float | None = key(None, SCHEDULING, unit="MiB", above=0)
    """The same limit as the memory of their tokens and log-probs; null: no limit."""


@dataclass
class ClusterConfig(KeyGroup):
    """Ray, devices, timeouts and fault tolerance."""

    device: str = key(
        "auto", RESOURCES, choices="auto (GPUs if any node of the Ray cluster has some, else CPUs) | cpu | cuda"
    )
    """Device type of the run."""
    ray_address: str | None = key(None, RESOURCES)
    """Address of a running Ray cluster (`auto` or host:port); null: start Ray on this machine for this run."""
    node_order: list[str] = key([], RESOURCES)
    """Node order for slot placement, as addresses or prefixes of Ray node ids; adjacent nodes exchange the most data.
    Unlisted nodes follow, the driver's node first; an unknown node is an error at startup."""
    timeout_s: float = key(1800.0, RESOURCES, unit="s", above=0)
    """Timeout for starting a worker, for one remote call, for waiting for slots that other jobs use, and, after a
    restart, for lost nodes."""
    heartbeat_s: float = key(60.0, RESOURCES, unit="s", above=0)
    """Time without a response or progress after which a rollout engine is replaced, or a hanging trainer rank is killed
    and the run resumes from its last checkpoint. On GPUs it must exceed the time of the slowest layer; the first calls
    of a rank, which may compile kernels, get 5x that time. Raise it for debugging with breakpoints."""
    max_restarts: int = key(3, RESOURCES, at_least=0)
    """Maximum number of replacements of each rollout engine, and of restarts of the run from its last checkpoint after
    losing a trainer rank. 0: the first loss ends the run."""
    drain: list[int] = key([], RESOURCES)
    """Indices of slots that are drained from the start; `rlfuse slots` drains and restores slots during the run."""


@dataclass
class Config(KeyGroup):
    """Configuration of a job."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def slots(self) -> int:
        """Number of slots: each is a device with one trainer rank, shared with a rollout engine."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def mesh(self) -> ParallelMesh:
        """Mesh of the trainer ranks, one per slot."""
        return self.mesh_of(self.slots)

    def mesh_of(self, ranks: int) -> ParallelMesh:
        """Return the mesh of `ranks` trainer ranks; ValueError if the parallel sizes of `training` do not divide
        them."""
        training = self.training
        sizes = {"sp": training.ulysses_sequence_parallel_size, "pp": training.pipeline_parallel_size}
        return ParallelMesh.of(ranks, **sizes, tp=training.tensor_model_parallel_size)

    @property
    def run_folder(self) -> Path:
        """Absolute path of the run folder; `rlfuse.run.resume` sets the experiment name."""
        trainer = self.trainer
        name = trainer.experiment_name or trainer.job_name or "run"
        return (Path(trainer.default_local_dir) / trainer.project_name / name).absolute()

    @property
    def sharded_weights(self) -> bool:
        """True if the weights are sharded, so that every pass gathers each layer from all ranks."""
        return self.actor.strategy == "fsdp2" or self.actor.zero_stage == 3

    @property
    def sharded_gradients(self) -> bool:
        """True if the gradients are sharded, so that every backward pass reduces them."""
        return self.sharded_weights or self.actor.zero_stage == 2

    @property
    def sharded_optimizer(self) -> bool:
        """True if the optimizer state is sharded over ranks."""
        return self.actor.strategy == "fsdp2" or self.actor.zero_stage > 0

    @property
    def sharding(self) -> str:
        """The setting that decides the sharding, as `KEY=VALUE`."""
        actor = self.actor
        fsdp2 = actor.strategy == "fsdp2"
        return "actor.strategy=fsdp2" if fsdp2 else f"actor.zero_stage={actor.zero_stage}"

    @property
    def lockstep(self) -> bool:
        """True if passes need all ranks at once: they gather weights, split sequences, or run pipeline stages."""
        widths = (self.training.pipeline_parallel_size, self.training.ulysses_sequence_parallel_size)
        shared = self.rollout.tensor_model_parallel_size % self.training.tensor_model_parallel_size > 0
        return max(widths) > 1 or shared or self.sharded_weights

    @property
    def lockstep_backward(self) -> bool:
        """True if backward passes need all ranks at once."""
        return self.lockstep or self.sharded_gradients

    @property
    def uses_critic(self) -> bool:
        return not self.trainer.is_offline and traits_of(self.algorithm.adv_estimator).needs_critic

    @property
    def uses_reference(self) -> bool:
        if self.trainer.is_offline:
            return self.trainer.task == "dpo"
        estimator = traits_of(self.algorithm.adv_estimator)
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss or estimator.needs_reference

    @property
    def uses_rewards(self) -> bool:
        """False if samples are not scored by a reward: none is given, and the advantage estimator needs none."""
        given = bool(self.reward.functions) or self.reward.model_path is not None
        return given or traits_of(self.algorithm.adv_estimator).needs_rewards
