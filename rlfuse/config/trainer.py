"""Keys of the groups `trainer` and `alerts`: task, length, logging, validation and checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlfuse.config.declare import (
    LENGTH,
    LOGGING,
    OPTIMIZER,
    RESOURCES,
    RESUME_FROM,
    ROUNDING,
    RUN_NAME,
    SAVING,
    SCHEDULING,
    TRAINED,
    KeyGroup,
    key,
)


@dataclass
class TrainerConfig(KeyGroup):
    """The run: task, length, logging, validation, checkpoints."""

    task: str = key(
        "rl",
        TRAINED,
        choices="rl (a policy, on its own responses) | sft (a policy, on demonstrations) | dpo (a policy, on pairs) | "
        "reward_model (a classifier, on preference pairs)",
    )
    """Training task. All tasks but rl are offline: they train on the rows of data.train_files, with the settings of
    `actor`, and generate nothing."""
    project_name: str = key("rlfuse", RUN_NAME)
    """Name of the wandb project and of the folder above run folders."""
    experiment_name: str | None = key(None, RUN_NAME)
    """Name of the run in wandb and of the run folder; null: {job_name}-{algorithm}-{time}, unless resume_mode=auto
    finds a run of the same configuration and job_name to resume."""
    job_name: str | None = key(None, RUN_NAME)
    """Prefix of generated experiment names; null: the job file's name, or `run` without a job file."""
    logger: list[str] = key(
        ["console", "wandb"], LOGGING, choices="console | wandb | tensorboard | mlflow", accepts_entry=True
    )
    """Logging backends, in addition to metrics.jsonl. tensorboard and mlflow need the extras of the same name; mlflow
    logs to MLFLOW_TRACKING_URI, or to {default_local_dir}/mlflow."""
    wandb_mode: str = key("offline", LOGGING, choices="offline | online | disabled")
    """wandb mode."""
    wandb_group: str | None = key(None, LOGGING)
    """Name of the wandb group of the run; null: that of WANDB_RUN_GROUP, which sweeps set."""
    wandb_tags: list[str] = key([], LOGGING, accepts_entry=True)
    """Tags of the wandb run; []: those of WANDB_TAGS."""
    metrics: list[str] = key([], LOGGING, custom=True)
    """Custom metrics: functions of the samples of a step, each as `path/file.py:name`; logged as custom/NAME/... and,
    for validation, val-custom/NAME/.... Must be empty unless trainer.task=rl."""
    metrics_kwargs: dict[str, Any] = key({}, LOGGING)
    """Additional arguments of custom metrics, by name of the function: {length_bias: {cap: 512}}."""
    log_samples: int = key(16, LOGGING, at_least=0)
    """Number of samples per step written to samples.jsonl; 0: none."""
    log_samples_freq: int = key(10, LOGGING, unit="steps", at_least=0, or_minus_one=True)
    """Interval for logging the samples as a table (wandb, TensorBoard), also after the last step; -1 or 0: never.
    Tables of samples whose reward failed use the same interval."""
    log_val_generations: int = key(64, LOGGING, at_least=0)
    """Number of responses per validation written to validation.jsonl and the wandb table; 0: none."""
    rollout_data_dir: str | None = key(None, LOGGING, is_path=True)
    """Folder for all samples of each step, as {step}.jsonl with verl's names: input, output, gts, score, step and the
    reward parts; null: none."""
    validation_data_dir: str | None = key(None, LOGGING, is_path=True)
    """The same for all responses of each validation; null: none."""
    timeline_freq: int = key(10, LOGGING, unit="steps", at_least=0, or_minus_one=True)
    """Interval for drawing the timeline of the slots (timelines/ in the run folder, wandb), also after the last step;
    -1 or 0: never."""
    nnodes: int = key(1, SCHEDULING, at_least=1)
    """Number of nodes."""
    n_gpus_per_node: int = key(1, SCHEDULING, at_least=1)
    """Slots per node: GPUs, or, on CPU hosts, processes that share the cores."""
    total_epochs: int | None = key(None, LENGTH, at_least=1)
    """Number of epochs over the training files; null: 1, or as many as total_training_steps needs."""
    total_training_steps: int | None = key(None, LENGTH, unit="steps", at_least=1)
    """Number of training steps; the run ends after these or after total_epochs, whichever comes first."""
    critic_warmup: int = key(0, OPTIMIZER, at_least=0)
    """First training step that updates the actor; earlier steps train only the critic. 0 and 1 are equivalent."""
    val_before_train: bool = key(True, SAVING)
    """Run validation before the first training step."""
    test_freq: int = key(10, SAVING, unit="steps", at_least=0, or_minus_one=True)
    """Validation interval; also after the last step. -1 or 0: never."""
    save_freq: int = key(20, SAVING, unit="steps", at_least=0, or_minus_one=True)
    """Checkpoint interval; also after the last step. -1 or 0: never. A failure loses at most this many steps;
    Ctrl-C, SIGTERM and SIGHUP always save a checkpoint."""
    max_ckpt_to_keep: int | None = key(2, SAVING, at_least=1)
    """Maximum number of checkpoints to keep; older ones are removed. null: keep all."""
    preemption_grace_s: float = key(60.0, SAVING, unit="s", above=0)
    """Maximum time after SIGTERM or SIGHUP (a closed terminal) for finishing and saving the current step; after that,
    the run ends with its last checkpoint. Set it 15 s below the scheduler's grace period. Ctrl-C waits without limit; a
    second Ctrl-C ends the run immediately."""
    gc_freq: int = key(1, RESOURCES, unit="steps", at_least=0)
    """Interval for running Python's garbage collector in all processes at the same time, so that they do not pause one
    after the other. A process whose memory has grown much collects earlier; 0: left to Python."""
    deterministic: bool = key(False, ROUNDING)
    """Bitwise reproducible runs on the same machine: deterministic kernels, and no decisions based on measured times
    (requires fusion.policy=serial)."""
    resume_mode: str = key("auto", RESUME_FROM)
    """auto: resume from the newest complete checkpoint of the run folder; disable: start from scratch; the path of a
    global_step_N folder: resume from it. Settings that differ from the resumed run are accepted or rejected at startup,
    with a table."""
    default_local_dir: str = key("runs", RUN_NAME, is_path=True)
    """Root of all run folders, which are {default_local_dir}/{project_name}/{experiment_name}."""

    @property
    def is_offline(self) -> bool:
        """True if the task trains on a fixed dataset, without generation."""
        return self.task != "rl"


@dataclass
class AlertsConfig(KeyGroup):
    """Thresholds of alerts in the terminal and in wandb. null disables an alert; a metric that is missing for five
    steps is reported."""

    reward_drop: float | None = key(0.3, LOGGING, above=0, at_most=1)
    """Drop of the mean reward from its best value, as a fraction of the range of all rewards so far."""
    entropy_share: float | None = key(0.1, LOGGING, above=0, at_most=1)
    """Minimum entropy of the responses (response/entropy), as a fraction of its value in the first steps."""
    ppo_kl: float | None = key(0.1, LOGGING, above=0)
    """Maximum KL of the policy updates within a step (actor/ppo_kl)."""
    kl: float | None = key(None, LOGGING, above=0)
    """Maximum mean KL per token to the reference policy (actor/reward_kl_penalty, actor/kl_loss)."""
    grad_norm_factor: float | None = key(10.0, LOGGING, above=1)
    """Maximum gradient norm, relative to the median of the last 20 steps; ignored up to actor.grad_clip."""
    zero_spread: float | None = key(0.95, LOGGING, at_least=0, at_most=1)
    """Maximum fraction of groups whose rewards are all equal (rollout.n > 1)."""
    reward_failures: float | None = key(0.02, LOGGING, at_least=0, at_most=1)
    """Maximum fraction of the samples of a step without a reward."""
    log_probs_diff: float | None = key(1.0, LOGGING, above=0)
    """Maximum of training/rollout_log_probs_diff_max, relative to the rounding error (1e-3 nats with
    model.dtype=float32, 2 with bfloat16). Not checked for log-probs of other weights or of truncated sampling."""
    idle_share: float | None = key(0.5, LOGGING, at_least=0, at_most=1)
    """Maximum fraction of slot time without work, excluding startup."""
    slow_worker_s: float | None = key(240.0, LOGGING, unit="s", above=0)
    """Time for which a worker or node must differ from its peers (slower at the same work, stalled on memory or disk,
    ...), or 12 steps if that is shorter; null: workers are not monitored."""
