"""The configuration of a run: typed groups of keys with verl's leaf names. A key is declared here and nowhere else."""

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
    FRAMES,
    KL_CONTROL,
    LAYOUT,
    LENGTH,
    LOGGING,
    LOSS,
    LOSS_WEIGHTS,
    OPTIMIZER,
    ORDER,
    PROMPTS,
    RESOURCES,
    RESUME_FROM,
    ROUNDING,
    RUN_NAME,
    SAMPLING,
    SAVING,
    SCHEDULING,
    STORED,
    TOLERANCE,
    TRAINED,
    UPDATES,
    VALIDATION,
    WEIGHTS,
    Effect,
    Resume,
    key,
)
from rlfuse.config.estimators import in_words
from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.rewards import RewardConfig

_KL_ESTIMATORS = "k1 | kl (the same) | k2 | mse (the same) | k3 | low_var_kl (the same) | abs"


@dataclass
class DataConfig:
    """Prompts: files, lengths, order."""

    train_files: list[str] = key(MISSING, PROMPTS, is_path=True, accepts_entry=True)
    """Parquet, JSON, JSONL or CSV files, or Hugging Face dataset folders, with rows of verl or TRL."""
    val_files: list[str] = key([], VALIDATION, is_path=True, accepts_entry=True)
    """Held-out rows; empty turns validation off."""
    media_root: str | None = key(None, PROMPTS, is_path=True)
    """Folder that all clips and images of rows must be in, symbolic links resolved; relative paths start there. null:
    rows may name any file, and relative paths start at their data file. Set it for third-party data."""
    prompt_key: str = key("prompt", PROMPTS)
    """Column of the prompt: a string or a list of chat messages."""
    prompt_is_chat: bool = key(True, PROMPTS)
    """A string prompt is a user message, to which the chat template is applied; false: it is the prompt itself."""
    apply_chat_template_kwargs: dict[str, Any] = key({}, PROMPTS)
    """Arguments of the chat template, for instance enable_thinking; verl's name."""
    max_prompt_length: int = key(512, PROMPTS, unit="tokens", at_least=1)
    """Longest prompt, chat template included."""
    max_response_length: int = key(512, SAMPLING, unit="tokens", at_least=1)
    """Longest response."""
    train_batch_size: int = key(64, BATCH, at_least=1)
    """Prompts per step; the step has train_batch_size * rollout.n samples."""
    truncation: str = key(
        "error", PROMPTS, choices="error | left (keep the end) | right (keep the start) | middle (keep both ends)"
    )
    """How longer prompts are treated; clips and images are never cut."""
    filter_overlong_prompts: bool = key(False, PROMPTS)
    """Drop longer prompts while loading, clips included, and log how many, instead of applying `truncation`."""
    shuffle: bool = key(True, ORDER)
    """Shuffle rows every epoch, deterministically from `seed`."""
    seed: int = key(1, ORDER, at_least=0)
    """Seed of the run: order of the data, sampling, initial weights of the critic's head."""


@dataclass
class ModelConfig:
    """The policy's model; actor, reference and (unless given its own) critic start from it."""

    path: str = key(MISSING, WEIGHTS)
    """Hugging Face folder or hub name."""
    dtype: str = key("bfloat16", STORED, choices="float32 | bfloat16")
    """Type of the weights, in training and in the engines."""
    trust_remote_code: bool = key(False, Resume(Effect.IMMEDIATE, "permission to run the model's code"))
    """Run modelling code that ships with the model."""
    video_family: str | None = key(
        None, Resume(Effect.FIXED, "how clips are encoded, and where their tokens are placed"), custom=True
    )
    """A custom family of video models, a class as `path/file.py:name`; null: those of rlfuse/video/models."""
    use_remove_padding: bool = key(True, SCHEDULING)
    """Pack sequences instead of padding them, where the architecture allows it (otherwise they are padded, and this is
    logged)."""
    enable_gradient_checkpointing: bool = key(False, SCHEDULING)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    enable_activation_offload: bool = key(False, SCHEDULING)
    """Offload or recompute the activations of a micro-batch beyond activation_device_mb, whichever is faster; results
    are identical, shorter micro-batches are unaffected."""
    activation_device_mb: int = key(2048, SCHEDULING, unit="MiB", at_least=0)
    """Activations of layers that may stay on the device between forward and backward pass."""
    activation_host_mb: int | None = key(None, SCHEDULING, unit="MiB", at_least=0)
    """Pinned host memory for offloaded activations of a rank (GPUs); null: its share of a quarter of the node's free
    memory."""
    activation_disk_mb: int = key(0, SCHEDULING, unit="MiB", at_least=0)
    """Disk space for offloaded activations of a rank, below trainer.default_local_dir; every such micro-batch writes
    its own."""


@dataclass
class ValKwargs:
    """Sampling while validating, and of `rlfuse eval` and `rlfuse generate`."""

    n: int = key(1, VALIDATION, at_least=1)
    """Responses per validation prompt."""
    temperature: float = key(0.0, VALIDATION, at_least=0)
    """0 is greedy."""
    top_p: float = key(1.0, VALIDATION, above=0, at_most=1)
    """Nucleus mass."""
    top_k: int = key(-1, VALIDATION, at_least=1, or_minus_one=True)
    """Candidates per token, -1 for all."""
    min_p: float = key(0.0, VALIDATION, at_least=0, at_most=1)
    """Tokens less likely than this share of the most likely one are left out; 0 for none."""


@dataclass
class RolloutConfig:
    """Generation with vLLM, one engine per rollout slot."""

    name: str = key("vllm", TRAINED, choices="vllm | transformers (CPUs; models that vLLM does not support)")
    """The engine."""
    n: int = key(1, BATCH, at_least=1)
    """Responses per prompt (the group size)."""
    temperature: float = key(
        1.0,
        SAMPLING,
        above=0,
        remedy="training compares sampled responses; for greedy validation set rollout.val_kwargs.temperature=0",
    )
    """Sampling temperature; the trainer scales its logits by the same value."""
    top_p: float = key(1.0, SAMPLING, above=0, at_most=1)
    """Nucleus mass. Below 1 the engine's log-probs are those of the truncated distribution."""
    top_k: int = key(-1, SAMPLING, at_least=1, or_minus_one=True)
    """Candidates per token, -1 for all."""
    min_p: float = key(0.0, SAMPLING, at_least=0, at_most=1)
    """Tokens less likely than this share of the most likely one are left out; 0 for none. As with top_p, log-probs are
    those of the truncated distribution."""
    stop: list[str] = key([], SAMPLING)
    """Texts that end a response, in training and validation. All tokens up to the one that completes such a text are
    kept, scored and trained on."""
    tensor_model_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Devices per engine; slots / this = number of engines."""
    gpu_memory_utilization: float = key(0.5, RESOURCES, above=0, at_most=1)
    """Share of device memory that an engine may use (GPUs); its KV cache is no larger than max_num_seqs samples of full
    length need."""
    free_cache_engine: bool | None = key(None, RESOURCES)
    """Whether an engine frees the device while the trainer uses it (GPUs); null: only where the memory plan shows that
    both do not fit, see `rlfuse plan`."""
    kv_cache_memory_mb: int = key(256, RESOURCES, unit="MiB", at_least=1)
    """KV cache of an engine on CPU hosts."""
    max_num_seqs: int = key(256, RESOURCES, at_least=1)
    """Largest number of sequences that an engine decodes at once."""
    weight_transfer: str = key(
        "auto",
        RESOURCES,
        choices="auto (ipc on GPUs unless training is pipelined, else shm) | shm | ipc",
        rejected={"nccl": "NCCL refuses two ranks on one GPU, and a slot's engine and its rank share one"},
    )
    """How new weights reach the engines."""
    kv_transfer: str = key("auto", RESOURCES, choices="auto (which is shm) | shm | nixl (CPU hosts only)")
    """How the KV cache of a migrated sample reaches its engine."""
    disaggregate: str = key(
        "auto",
        SCHEDULING,
        choices="auto (if the simulated gain exceeds the measured error) | off | on (one node)",
    )
    """Whether some engines only prefill and send prompts with their KV caches to others that only decode."""
    scheduler: str = key("fast", RESOURCES, choices="fast (short path for decode steps) | vllm (its own)")
    """The engines' scheduler. Tokens and log-probs are the same."""
    update_weights_bucket_mb: int = key(512, RESOURCES, unit="MiB", at_least=1)
    """Size of the buckets in which weights are transferred; the trainer holds at most two of them in addition."""
    quantization: str | None = key(
        None,
        SAMPLING,
        choices="fp8_per_channel (CPUs; GPUs of compute capability 8.9 or more) | fp8_per_tensor (GPUs only) | "
        "fp8_per_block (GPUs only) | int8_per_channel_weight_only (experts alone; GPUs only)",
        rejected={"fp8": "vLLM means an 8-bit checkpoint by it; names of online quantization say the granularity"},
    )
    """8-bit quantization of the engines' linear layers, done by vLLM at every weight transfer; null: none. Needs
    algorithm.rollout_is_threshold."""
    on_mismatch: str = key("stop", TOLERANCE, choices="stop | alert")
    """What happens if engines and trainer give the same tokens different log-probs after the first weight transfer."""
    engine_kwargs: dict[str, Any] = key({}, SAMPLING)
    """Further arguments of vLLM's AsyncEngineArgs, by name."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)


@dataclass
class KlCtrl:
    """Coefficient of the KL penalty in the reward."""

    type: str = key("fixed", KL_CONTROL, choices="fixed | adaptive (steered to target_kl; Ziegler et al. 2019)")
    """The coefficient during a run."""
    kl_coef: float = key(0.001, KL_CONTROL, at_least=0)
    """Coefficient, or the initial one of the adaptive controller."""
    target_kl: float = key(0.1, KL_CONTROL, above=0)
    """Adaptive: target KL per token (mean over each response, then over responses)."""
    horizon: int = key(10000, KL_CONTROL, at_least=1)
    """Adaptive: samples over which the coefficient adjusts."""


@dataclass
class FilterGroups:
    """DAPO's dynamic sampling: replace groups whose rewards are all equal by groups of further prompts."""

    enable: bool = key(False, ADVANTAGE)
    """Train on groups with unequal rewards only, and generate until a step has data.train_batch_size of them."""
    max_num_gen_batches: int = key(0, ADVANTAGE, at_least=0)
    """Largest number of prompt batches that a step may generate for that; the run stops if they do not suffice. 0: no
    limit."""


@dataclass
class AlgorithmConfig:
    """Advantages and KL. Presets: algorithm=ppo | grpo | dr_grpo | gdpo | rloo | reinforce_plus_plus | dapo | gspo."""

    adv_estimator: str = key("gae", ESTIMATOR, choices=in_words(), custom=True)
    """Estimator of advantages."""
    gamma: float = key(1.0, ADVANTAGE, at_least=0, at_most=1)
    """Discount per token."""
    lam: float = key(1.0, ADVANTAGE, at_least=0, at_most=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = key(True, ADVANTAGE)
    """False leaves the group's standard deviation out (Dr. GRPO)."""
    use_kl_in_reward: bool = key(False, LOSS)
    """Subtract the KL to the reference from the per-token reward."""
    kl_penalty: str = key("k1", LOSS, choices=_KL_ESTIMATORS, custom=True)
    """Estimator of the KL in the reward."""
    kl_ctrl: KlCtrl = field(default_factory=KlCtrl)
    kl_coef_by_source: dict[str, float] = key({}, LOSS_WEIGHTS)
    """data_source (or a pattern with `*`) -> coefficient for its samples, instead of both kl_ctrl.kl_coef and
    actor.kl_loss_coef; the first match applies."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    old_log_probs: str = key("trainer", LOSS, choices="trainer (an extra pass, except for the first update) | engine")
    """Where the old log-probs of PPO's ratio come from."""
    rollout_is_threshold: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Cap of the truncated importance weight for the mismatch between engine and trainer; null turns it off."""


@dataclass
class OptimConfig:
    """AdamW and its schedule, which advances once per training step that trains the model, as verl's does."""

    lr: float = key(1e-6, OPTIMIZER, at_least=0)
    """Learning rate after warm-up."""
    weight_decay: float = key(0.01, OPTIMIZER, at_least=0)
    """Decoupled weight decay."""
    lr_warmup_steps: int = key(-1, OPTIMIZER, at_least=0, or_minus_one=True)
    """Training steps of linear warm-up from 0, which is the first step's rate; -1 or 0: lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = key(0.0, OPTIMIZER, at_least=0, at_most=1)
    """The same as a share of the run's training steps."""
    lr_scheduler_type: str = key("constant", OPTIMIZER, choices="constant | cosine (0 in the step after the last)")
    """The learning rate after warm-up."""


@dataclass
class ActorConfig:
    """The policy's updates, and DeepSpeed's settings for actor, critic and reference."""

    strategy: str = key("deepspeed", LAYOUT, choices="deepspeed (by zero_stage) | fsdp2 (fully_shard; CPUs)")
    """What shards and trains the models."""
    zero_stage: int = key(1, LAYOUT, at_least=0, at_most=3)
    """DeepSpeed ZeRO stage, 0-3."""
    offload_optimizer: bool = key(False, STORED)
    """Keep optimizer state in host memory (ZeRO 1-3, GPUs)."""
    optimizer_residency: str = key(
        "training",
        SCHEDULING,
        choices="training (as long as the weights) | forecast (loaded just in time for the predicted first update) | "
        "step (only during each update: less memory, more copies)",
    )
    """When optimizer state is on the device; it never is during generation (GPUs)."""
    grad_accum_dtype: str = key(
        "float32",
        OPTIMIZER,
        choices="float32 | bfloat16 (half the memory; a sum of 256 micro-batches is off by 2 %)",
    )
    """Type in which gradients of bfloat16 weights are accumulated."""
    cuda_graphs: str = key("auto", ROUNDING, choices="auto (small models, bound by kernel launches) | on | off")
    """Record passes over micro-batches of up to 2048 tokens as CUDA graphs, and replay them (GPUs)."""
    grad_clip: float = key(1.0, OPTIMIZER, at_least=0)
    """Largest global gradient norm; 0 does not clip. A step whose norm is not finite is skipped in any case."""
    ppo_max_token_len_per_gpu: int = key(16384, SCHEDULING, unit="tokens", at_least=1)
    """Token budget of a micro-batch on one rank; a longer sequence forms a micro-batch alone."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, SCHEDULING, at_least=1)
    """Largest number of sequences per micro-batch; null: only the token budget limits it."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = key(64, UPDATES, at_least=1)
    """Prompts per optimizer step; divides data.train_batch_size."""
    ppo_epochs: int = key(1, UPDATES, at_least=1)
    """Passes over a step's samples."""
    clip_ratio: float = key(0.2, LOSS_WEIGHTS, above=0)
    """PPO's clip range, both sides unless low / high are given."""
    clip_ratio_low: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Lower clip range (DAPO); null: clip_ratio."""
    clip_ratio_high: float | None = key(None, LOSS_WEIGHTS, above=0)
    """Upper clip range (DAPO); null: clip_ratio."""
    clip_ratio_c: float | None = key(3.0, LOSS_WEIGHTS, above=1)
    """Dual clip for negative advantages (Ye et al. 2020); null turns it off."""
    loss_mode: str = key("vanilla", LOSS, choices="vanilla (per token) | gspo (per sequence)", custom=True)
    """Policy loss."""
    loss_agg_mode: str = key(
        "token-mean", LOSS, choices="token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm"
    )
    """How the losses of a batch's tokens are aggregated."""
    entropy_coeff: float = key(0.0, LOSS_WEIGHTS, at_least=0)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = key(False, LOSS)
    """Add the KL to the reference to the loss."""
    kl_loss_coef: float = key(0.001, LOSS_WEIGHTS, at_least=0)
    """Weight of that KL."""
    kl_loss_type: str = key("k3", LOSS, choices=_KL_ESTIMATORS, custom=True)
    """Estimator of the KL in the loss."""


@dataclass
class CriticOptim:
    """The critic's optimizer; everything else is as in actor.optim."""

    lr: float = key(1e-5, OPTIMIZER, at_least=0)
    """The critic's learning rate after warm-up."""


@dataclass
class CriticConfig:
    """The value model; used by estimators of advantages that need one, as gae. What is not here is as in `actor`."""

    path: str | None = key(None, WEIGHTS)
    """Initial weights, of any family; null: model.path. A value head there (`score`, or the names of TRL and verl) is
    loaded, otherwise the head starts at 0."""
    cliprange_value: float = key(0.5, LOSS_WEIGHTS, above=0)
    """Clip range of the value loss."""
    optim: CriticOptim = field(default_factory=CriticOptim)


@dataclass
class RefConfig:
    """The frozen reference policy; used when a KL is."""

    path: str | None = key(None, Resume(Effect.EXPERIMENT, "another reference policy"))
    """Weights of the reference; null: model.path."""


@dataclass
class TrainingConfig:
    """How models and long sequences are distributed over trainer ranks."""

    pipeline_parallel_size: int = key(1, LAYOUT, at_least=1)
    """Pipeline stages of actor, critic and reference; divides the slots, the rest is data parallelism. 1: no
    pipeline."""
    virtual_pipeline_model_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Stages of a model on each device of a pipeline: more stages mean shorter bubbles and more transfers."""
    pipeline_placement: str = key("v", SCHEDULING, choices="v (V-shaped) | interleaved")
    """Placement of several stages on the devices of a pipeline."""
    vocabulary_parallel: bool = key(False, SCHEDULING)
    """All devices of a pipeline share the output head of actor and reference, a range of tokens each, so that no device
    waits for a large vocabulary."""
    tensor_model_parallel_size: int = key(1, LAYOUT, at_least=1)
    """Ranks that share every layer of actor, critic and reference, also in stages; the rest is data parallelism. 1:
    none."""
    ulysses_sequence_parallel_size: int = key(1, SCHEDULING, at_least=1)
    """Largest number of ranks that share a sequence, a power of two; each batch's degree depends on its lengths. 1:
    none."""
    split_backward: bool = key(False, SCHEDULING)
    """Compute gradients of weights separately from those of inputs, to fill bubbles."""
    activation_memory: float | None = key(1.5, SCHEDULING, above=0)
    """Activations that a device may hold, relative to serial 1F1B; null: no limit."""


@dataclass
class FusionConfig:
    """When each piece of work runs, never what is computed; only `data` beyond exact changes what is learned from."""

    training: str = key("fused", SCHEDULING, choices="fused (in one pipeline schedule) | serial")
    """How actor, critic and passes of later mini-batches run in pipelines (pipeline_parallel_size > 1)."""
    policy: str = key("adaptive", SCHEDULING, choices="serial | stream | rlhfuse | adaptive", custom=True)
    """When and where work runs; all policies are exact."""
    data: str = key(
        "exact",
        BATCH,
        choices="exact | tail_batching (reordered) | over_sampling (off-policy) | partial_rollout (off-policy) | "
        "one_step_off (off-policy)",
    )
    """Which samples a step learns from."""
    excess: float = key(0.25, BATCH, above=0)
    """Prompts drawn beyond the batch, as a share of it (tail_batching, over_sampling, partial_rollout)."""
    tail_speculation: int = key(0, Resume(Effect.NEXT_STEP, "the same distribution of tokens, other draws"), at_least=0)
    """Draft tokens by n-grams while at most this many samples decode: exact in distribution; 0 turns it off."""
    credit_samples: int | None = key(None, SCHEDULING, at_least=1)
    """Finished samples that may wait to be scored before generation pauses; null: all of a step."""
    credit_mb: float | None = key(None, SCHEDULING, unit="MiB", above=0)
    """The same limit as MiB of their tokens and log-probs; null: no limit."""


@dataclass
class VideoConfig:
    """Clips and images of rows: which frames the model sees, and their encoding."""

    sampling: str = key(
        "family",
        FRAMES,
        choices="family (number and size of the model's own processor) | seed_vl (Seed1.5-VL: frames per second by "
        "task, the largest of `levels` that fits) | fixed (the same number and size for every clip)",
    )
    """Which frames the model sees."""
    mm_processor_kwargs: dict[str, Any] = key({}, FRAMES)
    """family: settings that replace those of the model's own video processor: fps, min_frames, max_frames, min_pixels,
    max_pixels; Qwen: cap_pixels_per_frame (true: bound the pixels of a clip as qwen-vl-utils and verl do; transformers'
    default is false), max_video_tokens; VideoLLaMA3: use_token_compression (leave out tokens that repeat those of the
    previous frame, for which clips are decoded at startup; transformers' default is true). vLLM's name."""
    timestamps: str = key(
        "family",
        FRAMES,
        choices="family (as the model's own processor: VideoLLaMA3 `Time 1.5s:`, Qwen3-VL `<1.5 seconds>`, "
        "Qwen2.5-VL none) | seed_vl (`[1.5 second]`)",
    )
    """How the prompt gives the time of a frame."""
    max_tokens: int = key(81920, FRAMES, unit="tokens", at_least=1)
    """seed_vl: largest number of visual tokens of a clip."""
    levels: list[int] = key([640, 512, 384, 256, 160, 128], FRAMES)
    """seed_vl: tokens per frame to choose from, largest first."""
    fps_general: float = key(1.0, FRAMES, above=0)
    """seed_vl: frames per second for the task `general`."""
    fps_detail: float = key(2.0, FRAMES, above=0)
    """seed_vl: for the task `detail`, fine temporal detail."""
    fps_motion: float = key(5.0, FRAMES, above=0)
    """seed_vl: for the task `motion`, counting and motion."""
    task: str = key("general", FRAMES, choices="general | detail | motion")
    """Task of rows without extra_info.task."""
    frames: int = key(128, FRAMES, at_least=1)
    """fixed: frames of a clip, spread evenly; fewer if the clip has fewer."""
    tokens_per_frame: int = key(256, FRAMES, unit="tokens", at_least=1)
    """fixed: largest number of tokens of a frame."""
    max_image_tokens: int | None = key(None, FRAMES, unit="tokens", at_least=1)
    """Largest number of visual tokens of an image; null: the limit of the model's own processor."""
    encoder_ranks: int | None = key(None, RESOURCES, at_least=1)
    """Processes with a vision tower, which share the frames of a step; null: one per slot."""
    cache_mb: int = key(4096, RESOURCES, unit="MiB", at_least=1)
    """Embeddings kept in the shared memory of a node; those of one step must fit."""
    disk_cache: str | None = key(None, RESOURCES, is_path=True)
    """Folder where embeddings are kept between runs (they never change while the tower is frozen)."""
    decode_workers: int = key(1, RESOURCES, at_least=1)
    """Decoding processes of each encoder rank."""
    prefetch_mb: int = key(512, RESOURCES, unit="MiB", at_least=0)
    """Frames of the next step or validation that each encoder rank decodes ahead; 0: none."""
    encode_ahead: bool = key(False, RESOURCES)
    """Encode clips of the next step or validation ahead, not only decode them, on as few encoder ranks as keep up by
    measured rates, and within video.cache_mb."""
    decode_timeout_s: float = key(60.0, RESOURCES, unit="s", above=0)
    """Longest time to read a clip, or the part of it that one rank encodes."""
    max_failure_rate: float = key(0.1, TOLERANCE, at_least=0, at_most=1)
    """Rows with unusable clips or images are left out; above this share, also of a step's rows, the run stops."""
    log_clips: int | None = key(None, LOGGING, at_least=0)
    """Clips of a step's logged samples whose frames are drawn with question, answers and rewards; null: all, 0:
    none."""
    freeze_vision_tower: bool = key(True, TRAINED)
    """false: the actor's updates train the vision tower too, on clips encoded again with gradients."""


@dataclass
class TrainerConfig:
    """The run: what is trained, length, logging, checkpoints."""

    task: str = key(
        "rl",
        TRAINED,
        choices="rl (a policy, by reward) | reward_model (a classifier, on preference pairs, with `actor`'s settings)",
    )
    """What is trained."""
    project_name: str = key("rlfuse", RUN_NAME)
    """wandb project and folder name."""
    experiment_name: str | None = key(None, RUN_NAME)
    """Name of the wandb run and the folder; null: {job_name}-{algorithm}-{time}, except that resume_mode=auto resumes
    the project's last run of the same configuration and job_name."""
    job_name: str | None = key(None, RUN_NAME)
    """Prefix of generated experiment names; null: the job file's name, else `run`."""
    logger: list[str] = key(["console", "wandb"], LOGGING, choices="console | wandb | tensorboard", accepts_entry=True)
    """Where metrics are logged, in addition to metrics.jsonl."""
    wandb_mode: str = key("offline", LOGGING, choices="offline | online | disabled")
    """wandb's mode."""
    metrics: list[str] = key([], LOGGING, custom=True)
    """Custom metrics: functions of a step's samples, each as `path/file.py:name`; logged as custom/NAME/..., those of a
    validation as val-custom/NAME/.... Empty with trainer.task=reward_model, which has pairs and no samples."""
    log_samples: int = key(16, LOGGING, at_least=0)
    """Samples per step kept in samples.jsonl; 0 for none."""
    log_samples_freq: int = key(10, LOGGING, unit="steps", at_least=0, or_minus_one=True)
    """Log these samples as a table (wandb, TensorBoard) every so many steps, and after the last; -1 or 0: never. Tables
    of samples whose reward failed are not logged more often either."""
    log_val_generations: int = key(64, LOGGING, at_least=0)
    """Answers of each validation in validation.jsonl and the wandb table, from the first prompt on; 0: none."""
    timeline_freq: int = key(10, LOGGING, unit="steps", at_least=0, or_minus_one=True)
    """Draw the timeline of the slots every so many steps, and after the last (timelines/ in the run folder, wandb); -1
    or 0: never."""
    nnodes: int = key(1, LAYOUT, at_least=1)
    """Nodes."""
    n_gpus_per_node: int = key(1, LAYOUT, at_least=1)
    """Slots per node: GPUs, or on CPU hosts processes that share the cores."""
    total_epochs: int | None = key(None, LENGTH, at_least=1)
    """Passes over the training files; null: 1, or as many as total_training_steps needs."""
    total_training_steps: int | None = key(None, LENGTH, unit="steps", at_least=1)
    """Training steps; the run ends with these or with total_epochs, whichever comes first."""
    critic_warmup: int = key(0, OPTIMIZER, at_least=0)
    """The first training step that trains the actor; earlier steps train the critic alone. 0 is the same as 1."""
    val_before_train: bool = key(True, SAVING)
    """Validate before the first step."""
    test_freq: int = key(10, SAVING, unit="steps", at_least=0, or_minus_one=True)
    """Validate every so many steps, and after the last; -1 or 0: never."""
    save_freq: int = key(20, SAVING, unit="steps", at_least=0, or_minus_one=True)
    """Write a checkpoint every so many steps, and after the last; -1 or 0: never. Smaller values lose fewer steps after
    a failure, and max_ckpt_to_keep bounds the disk space; Ctrl-C, SIGTERM and SIGHUP save in any case."""
    max_ckpt_to_keep: int | None = key(2, SAVING, at_least=1)
    """Keep the newest so many checkpoints; null keeps all."""
    preemption_grace_s: float = key(60.0, SAVING, unit="s", above=0)
    """After SIGTERM or SIGHUP (a closed terminal) the current step may take this long to finish and be saved; then the
    last checkpoint counts. Set it 15 s below the scheduler's grace period. Ctrl-C waits without limit; a second Ctrl-C
    ends the run at once."""
    gc_freq: int = key(1, RESOURCES, unit="steps", at_least=0)
    """Run Python's garbage collection in all processes at once, every so many steps. 0 leaves it to Python, which
    pauses each process, and those that wait for it, at other times. A process that has grown much collects earlier.
    With 1 a collection takes milliseconds: objects that survived the first are not scanned again."""
    deterministic: bool = key(False, ROUNDING)
    """Two runs on the same machine give the same bits: deterministic kernels, and no decision by measured times (needs
    fusion.policy=serial)."""
    resume_mode: str = key("auto", RESUME_FROM)
    """auto resumes from the newest complete checkpoint of the run folder, disable starts from scratch, the path of a
    global_step_N folder resumes from that one. Settings that differ from the run's take effect or are refused, with a
    table, before the run starts."""
    default_local_dir: str = key("runs", RUN_NAME, is_path=True)
    """Run folders are {default_local_dir}/{project_name}/{experiment_name}."""


@dataclass
class AlertsConfig:
    """When to raise an alert, at the terminal and in wandb. null turns one off; metrics missing for five steps are
    reported."""

    reward_drop: float | None = key(0.3, LOGGING, above=0, at_most=1)
    """Mean reward below its best, as a share of the range of all rewards seen."""
    entropy_share: float | None = key(0.1, LOGGING, above=0, at_most=1)
    """Entropy of all responses (response/entropy) below this share of that of the first steps."""
    ppo_kl: float | None = key(0.1, LOGGING, above=0)
    """Change of the policy within a step (actor/ppo_kl)."""
    kl: float | None = key(None, LOGGING, above=0)
    """KL to the reference (actor/reward_kl_penalty, actor/kl_loss); sensible values depend on the estimator and on lengths."""
    grad_norm_factor: float | None = key(10.0, LOGGING, above=1)
    """Gradient norm over the median of the last 20 steps."""
    zero_spread: float | None = key(0.95, LOGGING, at_least=0, at_most=1)
    """Share of groups whose rewards are all equal (rollout.n > 1)."""
    reward_failures: float | None = key(0.02, LOGGING, at_least=0, at_most=1)
    """Share of a step's samples without a reward."""
    log_probs_diff: float | None = key(1.0, LOGGING, above=0)
    """training/rollout_log_probs_diff_max relative to what rounding explains: 1e-3 nats with model.dtype=float32, 2
    with bfloat16; not checked for log-probs of other weights or of truncated sampling."""
    idle_share: float | None = key(0.5, LOGGING, at_least=0, at_most=1)
    """Share of the slots' time without work, start-up left out."""
    slow_worker_s: float | None = key(240.0, LOGGING, unit="s", above=0)
    """Time for which one worker or node differs from its peers (slower at the same work, stalled for memory or disks,
    ...), or 12 steps if they are shorter; null: workers are not monitored."""


@dataclass
class ClusterConfig:
    """Ray and the devices it places work on."""

    device: str = key("auto", RESOURCES, choices="auto (GPUs if any node of Ray's has some, else CPUs) | cpu | cuda")
    """Devices of the run."""
    ray_address: str | None = key(None, RESOURCES)
    """A running Ray cluster (`auto` or host:port); null starts one for this run."""
    node_order: list[str] = key([], RESOURCES)
    """Addresses, or prefixes of Ray's ids, of the nodes whose slots come first, in this order: neighbours in it
    exchange the most data. Others follow, the driver's own first; a name without a node is refused at startup."""
    timeout_s: float = key(1800.0, RESOURCES, unit="s", above=0)
    """Longest time that a worker's start or one remote call may take, and that a run waits for slots of other jobs or,
    when it restarts, for lost nodes."""
    heartbeat_s: float = key(60.0, RESOURCES, unit="s", above=0)
    """A rollout engine that does not respond for this long, or makes no progress with samples assigned, is killed and
    replaced; so is a trainer rank that stops while it scores or trains, and the run resumes from its last checkpoint.
    Ongoing computation may take longer. Raise it to stop in a debugger; on GPUs it must exceed the longest layer, and a
    rank's first calls, which may compile, get five times as much."""
    max_restarts: int = key(3, RESOURCES, at_least=0)
    """How often each lost rollout engine is replaced, and how often the run restarts from its last checkpoint after the
    loss of a trainer rank; 0: the first such loss ends the run."""
    drain: list[int] = key([], RESOURCES)
    """Indices of slots that get no work of their own, from the start on; `rlfuse slots` changes that during the run."""


@dataclass
class Config:
    """A whole job."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def slots(self) -> int:
        """Devices of the run: one trainer rank each, shared in tensor-parallel groups by the rollout engines."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def mesh(self) -> ParallelMesh:
        """The trainer's ranks, one for each slot."""
        return self.mesh_of(self.slots)

    def mesh_of(self, ranks: int) -> ParallelMesh:
        """Return the mesh of that many trainer ranks; ValueError where the degrees of `training` do not divide them."""
        training = self.training
        sizes = {"sp": training.ulysses_sequence_parallel_size, "pp": training.pipeline_parallel_size}
        return ParallelMesh.of(ranks, **sizes, tp=training.tensor_model_parallel_size)

    @property
    def run_folder(self) -> Path:
        """Absolute folder of all files of the run; `rlfuse.run.resume` gives a run its name."""
        trainer = self.trainer
        name = trainer.experiment_name or trainer.job_name or "run"
        return (Path(trainer.default_local_dir) / trainer.project_name / name).absolute()

    @property
    def sharded_weights(self) -> bool:
        """Whether ranks gather each layer's weights from one another, in every pass."""
        return self.actor.strategy == "fsdp2" or self.actor.zero_stage == 3

    @property
    def sharded_gradients(self) -> bool:
        """Whether ranks reduce gradients in every backward pass."""
        return self.sharded_weights or self.actor.zero_stage == 2

    @property
    def sharded_optimizer(self) -> bool:
        """Whether each rank has a share of the optimizer's states."""
        return self.actor.strategy == "fsdp2" or self.actor.zero_stage > 0

    @property
    def sharding(self) -> str:
        """The key by which ranks shard models."""
        actor = self.actor
        fsdp2 = actor.strategy == "fsdp2"
        return "actor.strategy=fsdp2" if fsdp2 else f"actor.zero_stage={actor.zero_stage}"

    @property
    def lockstep(self) -> bool:
        """Whether passes need all ranks together: they gather weights, split rows, or hold stages."""
        widths = (self.training.pipeline_parallel_size, self.training.ulysses_sequence_parallel_size)
        shared = self.rollout.tensor_model_parallel_size % self.training.tensor_model_parallel_size > 0
        return max(widths) > 1 or shared or self.sharded_weights

    @property
    def lockstep_backward(self) -> bool:
        """Whether backward passes need all ranks together."""
        return self.lockstep or self.sharded_gradients

    @property
    def uses_critic(self) -> bool:
        return traits_of(self.algorithm.adv_estimator).needs_critic

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss
