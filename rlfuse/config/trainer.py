"""The group `trainer`. A part of the schema, whose rules hold here too (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainerConfig:
    """The run: what is trained, length, logging, checkpoints."""

    task: str = "rl"
    """rl | reward_model: a policy by reward, or a classifier by chosen / rejected rows, with `actor`'s settings."""
    project_name: str = "rlfuse"
    """wandb project and folder name."""
    experiment_name: str = "run"
    """wandb run and folder name."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"])
    """console | wandb | tensorboard; metrics.jsonl is always written."""
    wandb_mode: str = "offline"
    """offline | online | disabled."""
    log_samples: int = 16
    """Samples per step that samples.jsonl and the wandb table show; 0 for none."""
    timeline_freq: int = 10
    """Draw what slots did every so many steps (timelines/ in the run folder, wandb); -1 only at the end, 0 never."""
    nnodes: int = 1
    """Nodes."""
    n_gpus_per_node: int = 1
    """Slots per node: GPUs, or on CPU hosts processes that share the cores."""
    total_epochs: int = 1
    """Passes over the training files."""
    total_training_steps: int | None = None
    """Steps; overrides total_epochs."""
    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    val_before_train: bool = True
    """Validate before the first step."""
    test_freq: int = -1
    """Validate every so many steps; -1 only at the end."""
    save_freq: int = -1
    """Checkpoint every so many steps; -1 only at the end, 0 never."""
    max_ckpt_to_keep: int | None = 2
    """Keep the newest so many checkpoints; null keeps all."""
    preemption_grace_s: float = 60.0
    """After SIGTERM the step under way may take so long to end and be saved; then the last checkpoint counts. Stay 15 s
    below what the scheduler leaves."""
    deterministic: bool = False
    """Two runs on the same machine give the same bits: deterministic kernels, and nothing that goes by measured times
    (needs fusion.policy=serial)."""
    resume_mode: str = "auto"
    """auto (newest complete checkpoint of the run folder) | disable | the path of a global_step_N folder."""
    default_local_dir: str = "runs"
    """Run folders are {default_local_dir}/{project_name}/{experiment_name}."""
