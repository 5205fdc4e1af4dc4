"""The configuration of a run: typed groups with verl's leaf names, each key documented by the string below it.

A docstring that ends with a colon is followed by the key's valid values wherever it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rlfuse.config.own_functions import traits_of
from rlfuse.config.parallel_mesh import ParallelMesh
from rlfuse.config.rewards import RewardConfig
from rlfuse.config.run_groups import AlertsConfig, ClusterConfig, TrainerConfig
from rlfuse.config.video import VideoConfig


@dataclass
class DataConfig:
    """Prompts: files, lengths, order."""

    train_files: list[str] = MISSING
    """Parquet, JSON, JSONL, CSV files or Hugging Face data-set folders with verl or TRL rows."""
    val_files: list[str] = field(default_factory=list)
    """Held-out rows; empty turns validation off."""
    media_root: str | None = None
    """Folder in which all clip and image files of rows must lie, symbolic links resolved; relative paths start there.
    null: rows may name any file, and relative paths start at their data file. Set it for third-party data."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string or a list of chat messages."""
    prompt_is_chat: bool = True
    """A string prompt is a user message, to which the chat template is applied; false: it is the prompt itself."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template wherever prompts are made, for instance enable_thinking; verl's name."""
    max_prompt_length: int = 512
    """Longest prompt, in tokens, chat template included."""
    max_response_length: int = 512
    """Most tokens that a response may have."""
    train_batch_size: int = 64
    """Prompts per step; the step has train_batch_size * rollout.n samples."""
    truncation: str = "error"
    """What to do with longer prompts, of which clips and images are never cut:"""
    filter_overlong_prompts: bool = False
    """Drop longer prompts while loading, clips included, and log how many, instead of applying `truncation`."""
    shuffle: bool = True
    """Shuffle rows every epoch, deterministically from `seed`."""
    seed: int = 1
    """Seed of the run: order of data, sampling, the critic's fresh head."""


@dataclass
class ModelConfig:
    """The policy's model; actor, reference and (unless given its own) critic start from it."""

    path: str = MISSING
    """Hugging Face folder or hub name."""
    dtype: str = "bfloat16"
    """Type of the weights, in training and in the engines:"""
    trust_remote_code: bool = False
    """Run modelling code that ships with the model."""
    video_family: str | None = None
    """A family of video models of your own, a class as `path/file.py:name`; null: those of rlfuse/video/models."""
    use_remove_padding: bool = True
    """Pack sequences instead of padding them, where the architecture allows it (else padded, and said so)."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    enable_activation_offload: bool = False
    """Where a micro-batch's layers leave more than activation_device_mb, the rest waits off the device or is computed
    again, as is sooner done; it changes no number, and nothing of shorter micro-batches."""
    activation_device_mb: int = 2048
    """MiB of activations that layers may leave on the device between forward and backward pass."""
    activation_host_mb: int | None = None
    """MiB of pinned host memory for those of a rank (GPUs); null: its share of a quarter of what its node has free."""
    activation_disk_mb: int = 0
    """MiB of disk for those of a rank, below trainer.default_local_dir; every such micro-batch writes its own."""


@dataclass
class ValKwargs:
    """Sampling while validating, and of `rlfuse eval` and `rlfuse generate`."""

    n: int = 1
    """Responses per validation prompt."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass."""
    top_k: int = -1
    """Candidates per token, -1 for all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are left out; 0 for none."""


@dataclass
class RolloutConfig:
    """Generation with vLLM, one engine per rollout slot."""

    name: str = "vllm"
    """The engine:"""
    n: int = 1
    """Responses per prompt (the group size)."""
    temperature: float = 1.0
    """Sampling temperature; the trainer scales its logits by the same."""
    top_p: float = 1.0
    """Nucleus mass. Below 1 the engine's log-probs are of the truncated distribution."""
    top_k: int = -1
    """Candidates per token, -1 for all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are left out, 0 for none. As with top_p, log-probs are then
    of what is left."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, in training and validation. All tokens up to the one that completes such a text are
    kept, scored and trained on."""
    tensor_model_parallel_size: int = 1
    """Devices per engine; slots / this = number of engines."""
    gpu_memory_utilization: float = 0.5
    """Share of device memory that an engine may take (GPUs); its KV cache is no larger than max_num_seqs of the longest
    samples need."""
    free_cache_engine: bool | None = None
    """Whether an engine frees the device while the trainer has it (GPUs); null: only where the memory plan shows that
    both do not fit. What it shows is in `rlfuse plan`."""
    kv_cache_memory_mb: int = 256
    """KV cache of an engine on CPU hosts, in MiB."""
    max_num_seqs: int = 256
    """Most sequences that an engine decodes at once."""
    weight_transfer: str = "auto"
    """How new weights reach the engines:"""
    kv_transfer: str = "auto"
    """How a moved sample's KV cache reaches its engine:"""
    disaggregate: str = "auto"
    """Whether some engines read prompts and hand them on, with their KV caches, to others that only decode:"""
    scheduler: str = "fast"
    """The engines' scheduler. Tokens and log-probs are the same:"""
    update_weights_bucket_mb: int = 512
    """Weights travel in buckets of this many MiB; the trainer never holds more than two of them extra."""
    quantization: str | None = None
    """The engines' linear layers have 8 bits, which vLLM makes of the trained weights at every push; null: they are as
    trained. Needs algorithm.rollout_is_threshold:"""
    on_mismatch: str = "stop"
    """Where engines and trainer, after the first weights, give the same tokens other log-probs:"""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """More of vLLM's AsyncEngineArgs, by their names."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)


@dataclass
class KlCtrl:
    """Coefficient of the KL penalty in the reward."""

    type: str = "fixed"
    """The coefficient during a run:"""
    kl_coef: float = 0.001
    """Coefficient, or where the adaptive controller starts."""
    target_kl: float = 0.1
    """Adaptive: KL per token to steer to (mean over each response, then over responses)."""
    horizon: int = 10000
    """Adaptive: samples over which the coefficient adjusts."""


@dataclass
class FilterGroups:
    """DAPO's dynamic sampling: replace groups whose rewards are all equal by groups of further prompts."""

    enable: bool = False
    """Train on groups with unequal rewards only, and generate until a step has data.train_batch_size of them."""
    max_num_gen_batches: int = 0
    """Batches of prompts that a step may generate for that; the run stops where they do not suffice. 0: no limit."""


@dataclass
class AlgorithmConfig:
    """Advantages and KL. Presets: algorithm=ppo | grpo | dr_grpo | gdpo | rloo | reinforce_plus_plus | dapo | gspo."""

    adv_estimator: str = "gae"
    """Estimator of advantages:"""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """False leaves the group's standard deviation out (Dr. GRPO)."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the per-token reward."""
    kl_penalty: str = "k1"
    """Estimator of the KL in the reward:"""
    kl_ctrl: KlCtrl = field(default_factory=KlCtrl)
    kl_coef_by_source: dict[str, float] = field(default_factory=dict)
    """data_source (or a pattern with `*`) -> the coefficient for its samples, in place of both kl_ctrl.kl_coef and
    actor.kl_loss_coef; the first that fits counts."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    old_log_probs: str = "trainer"
    """Whose log-probs PPO's ratio is relative to:"""
    rollout_is_threshold: float | None = None
    """Cap of the truncated importance weight for the engine/trainer mismatch; null turns it off."""


@dataclass
class OptimConfig:
    """AdamW and its schedule, which advances once per training step that trains the model, as verl's does."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    lr_warmup_steps: int = -1
    """Training steps of linear warm-up from 0, which is the first step's rate; -1 or 0: lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """The same as a share of the run's training steps."""
    lr_scheduler_type: str = "constant"
    """The learning rate after warm-up:"""


@dataclass
class ActorConfig:
    """The policy's updates, and DeepSpeed's settings for actor, critic and reference."""

    strategy: str = "deepspeed"
    """What shards and trains the models:"""
    zero_stage: int = 1
    """DeepSpeed ZeRO stage, 0-3."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO 1-3, GPUs)."""
    optimizer_residency: str = "training"
    """When optimizer state is on the device, where engines always generate without it (GPUs):"""
    grad_accum_dtype: str = "float32"
    """What gradients of bfloat16 weights are added up in:"""
    cuda_graphs: str = "auto"
    """Record the trainer's passes of micro-batches of up to 2048 tokens as CUDA graphs, and replay them (GPUs):"""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip. A step whose norm is not finite is skipped in any case."""
    ppo_max_token_len_per_gpu: int = 16384
    """Token budget of a micro-batch on one rank; a longer sequence gets a micro-batch of its own."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences per micro-batch at the most; null lets the token budget decide alone."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = 64
    """Prompts per optimizer step; divides data.train_batch_size."""
    ppo_epochs: int = 1
    """Passes over a step's samples."""
    clip_ratio: float = 0.2
    """PPO's clip range, both sides unless low / high are given."""
    clip_ratio_low: float | None = None
    """Lower clip range (DAPO); null takes clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper clip range (DAPO); null takes clip_ratio."""
    clip_ratio_c: float | None = 3.0
    """Dual clip for negative advantages (Ye et al. 2020); null turns it off."""
    loss_mode: str = "vanilla"
    """PPO's ratio, or another loss:"""
    loss_agg_mode: str = "token-mean"
    """How the losses of a batch's tokens become one:"""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "k3"
    """Estimator of the KL in the loss:"""


@dataclass
class CriticOptim:
    """The rest is as actor.optim."""

    lr: float = 1e-5
    """The critic's learning rate after warm-up."""


@dataclass
class CriticConfig:
    """The value model; used by estimators of advantages that need one, as gae. What is not here is as in `actor`."""

    path: str | None = None
    """Its starting weights, of any family; null takes model.path. A value head there (`score`, or as TRL and verl call
    theirs) is loaded, a fresh one begins at 0."""
    cliprange_value: float = 0.5
    """Clip range of the value loss."""
    optim: CriticOptim = field(default_factory=CriticOptim)


@dataclass
class RefConfig:
    """The frozen reference policy; used when a KL is."""

    path: str | None = None
    """Its weights; null takes model.path."""


@dataclass
class FusionConfig:
    """When each piece of work runs, never what is computed; only `data` beyond exact changes what is learned from."""

    training: str = "fused"
    """How actor, critic and passes of later mini-batches run in pipelines (pipeline_parallel_size > 1):"""
    policy: str = "adaptive"
    """When and where work runs; all are exact:"""
    data: str = "exact"
    """What a step learns from:"""
    excess: float = 0.25
    """Prompts drawn beyond the batch, as a share of it (tail_batching, over_sampling, partial_rollout)."""
    tail_speculation: int = 0
    """Guess tokens by n-grams while at most so many samples decode: exact in distribution; 0 turns it off."""
    credit_samples: int | None = None
    """Finished samples that may wait to be scored before generation pauses; null: all of a step."""
    credit_mb: float | None = None
    """The same as MiB of their tokens and log-probs; null: no limit."""


@dataclass
class TrainingConfig:
    """How models and long sequences are cut over trainer ranks."""

    pipeline_parallel_size: int = 1
    """Stages of actor, critic and reference; divides the slots, the rest is data parallelism. 1: no pipeline."""
    virtual_pipeline_model_parallel_size: int = 1
    """Stages of a model that each device of a pipeline holds: the more, the shorter bubbles, for more transfers."""
    pipeline_placement: str = "v"
    """How several stages go over a pipeline's devices:"""
    vocabulary_parallel: bool = False
    """All devices of a pipeline share the output head of actor and reference, a range of tokens each: no device is kept
    waiting by a wide vocabulary."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every layer of actor, critic and reference, also in stages; the rest is data parallelism. 1:
    none."""
    ulysses_sequence_parallel_size: int = 1
    """Most ranks that a sequence is cut over; a power of two. What each batch needs is chosen by length. 1: none."""
    split_backward: bool = False
    """Gradients of weights apart from those of inputs, as fillers of bubbles."""
    activation_memory: float | None = 1.5
    """Activations that a device may hold, relative to serial 1F1B; null: no limit."""


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
        """Where the run leaves everything, absolute; `rlfuse.run.acceptance` gives a run its name."""
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
        """Whether passes need all ranks together: they gather weights, cut rows, or hold stages."""
        widths = (self.training.pipeline_parallel_size, self.training.ulysses_sequence_parallel_size)
        shared = self.rollout.tensor_model_parallel_size % self.training.tensor_model_parallel_size > 0
        return max(widths) > 1 or shared or self.sharded_weights

    @property
    def lockstep_backward(self) -> bool:
        """Whether gradients do."""
        return self.lockstep or self.sharded_gradients

    @property
    def uses_critic(self) -> bool:
        return traits_of(self.algorithm.adv_estimator).needs_critic

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss
