"""The group `trainer`. A part of the schema, whose rules hold here too (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainerConfig:
    """The run: what is trained, length, logging, checkpoints."""

    task: str = "rl"
    """What is trained:"""
    project_name: str = "rlfuse"
    """wandb project and folder name."""
    experiment_name: str | None = None
    """wandb run and folder name; null: {job_name}-{algorithm}-{time}, but where a run of the same configuration is in
    the project, resume_mode=auto goes on with the last of them."""
    job_name: str | None = None
    """What runs without a name of their own are called after; null: the job file's name, else `run`."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"])
    """Where metrics go, beside metrics.jsonl which is always written:"""
    wandb_mode: str = "offline"
    """wandb's mode:"""
    metrics: list[str] = field(default_factory=list)
    """Figures of your own: functions of a step's samples, each as `path/file.py:name`; logged as custom/NAME/..., those
    of a validation as val-custom/NAME/...."""
    log_samples: int = 16
    """Samples per step that samples.jsonl and the wandb table show; 0 for none."""
    log_val_generations: int = 64
    """Answers of each validation that validation.jsonl and the wandb table show, from the first prompt on; 0: none."""
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
    test_freq: int = 10
    """Validate every so many steps, and after the last; -1 only then."""
    save_freq: int = 20
    """Checkpoint every so many steps, and after the last; -1 only then, 0 never. A lost run loses fewer steps,
    and with max_ckpt_to_keep the disk holds no more for it; Ctrl-C and SIGTERM save whatever this says."""
    max_ckpt_to_keep: int | None = 2
    """Keep the newest so many checkpoints; null keeps all."""
    preemption_grace_s: float = 60.0
    """After SIGTERM the step under way may take so long to end and be saved; then the last checkpoint counts. Stay 15 s
    below what the scheduler leaves. After Ctrl-C it takes what it takes: a second Ctrl-C ends it at once."""
    deterministic: bool = False
    """Two runs on the same machine give the same bits: deterministic kernels, and nothing that goes by measured times
    (needs fusion.policy=serial)."""
    resume_mode: str = "auto"
    """auto goes on from the newest complete checkpoint of the run folder, disable starts afresh, the path of a
    global_step_N folder goes on from that one. Settings that differ from the run's take effect or are refused, with a
    table, before anything starts."""
    default_local_dir: str = "runs"
    """Run folders are {default_local_dir}/{project_name}/{experiment_name}."""
