"""The groups `trainer`, `cluster` and `alerts` of the schema."""

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
    """wandb run and folder name; null: {job_name}-{algorithm}-{time}, but where a run of the same configuration and
    job_name is in the project, resume_mode=auto goes on with the last of them."""
    job_name: str | None = None
    """What runs without a name of their own are called after; null: the job file's name, else `run`."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"])
    """Where metrics go, beside metrics.jsonl which is always written:"""
    wandb_mode: str = "offline"
    """wandb's mode:"""
    metrics: list[str] = field(default_factory=list)
    """Figures of your own: functions of a step's samples, each as `path/file.py:name`; logged as custom/NAME/..., those
    of a validation as val-custom/NAME/.... Empty with trainer.task=reward_model, which has pairs and no samples."""
    log_samples: int = 16
    """Samples per step that samples.jsonl keeps; 0 for none."""
    log_samples_freq: int = 10
    """Log these samples as a table (wandb, TensorBoard) every so many steps, and after the last; -1 or 0: never. Tables
    of samples whose reward failed are not logged more often either."""
    log_val_generations: int = 64
    """Answers of each validation that validation.jsonl and the wandb table show, from the first prompt on; 0: none."""
    timeline_freq: int = 10
    """Draw what slots did every so many steps, and after the last (timelines/ in the run folder, wandb); -1 or 0:
    never."""
    nnodes: int = 1
    """Nodes."""
    n_gpus_per_node: int = 1
    """Slots per node: GPUs, or on CPU hosts processes that share the cores."""
    total_epochs: int | None = None
    """Passes over the training files; null: 1, or as many as total_training_steps needs."""
    total_training_steps: int | None = None
    """Training steps; the run ends with these or with total_epochs, whichever comes first."""
    critic_warmup: int = 0
    """The first training step that trains the actor; the steps before it train the critic alone. 0 is as 1."""
    val_before_train: bool = True
    """Validate before the first step."""
    test_freq: int = 10
    """Validate every so many steps, and after the last; -1 or 0: never."""
    save_freq: int = 20
    """Checkpoint every so many steps, and after the last; -1 or 0: never. A lost run loses fewer steps, and with
    max_ckpt_to_keep the disk holds no more for it; Ctrl-C, SIGTERM and SIGHUP save whatever this says."""
    max_ckpt_to_keep: int | None = 2
    """Keep the newest so many checkpoints; null keeps all."""
    preemption_grace_s: float = 60.0
    """After SIGTERM or SIGHUP (a closed terminal) the step under way may take so long to end and be saved; then the
    last checkpoint counts. Stay 15 s below what the scheduler leaves. After Ctrl-C it takes what it takes: a second
    Ctrl-C ends it at once."""
    gc_freq: int = 1
    """Collect Python's garbage in all processes together, after every so many steps; 0 leaves it to Python, which stops
    each at a moment of its own, and all that wait for it. A process that has grown by much collects earlier. With 1 no
    garbage outlives its step, which costs milliseconds: what was there after the first is not looked through again."""
    deterministic: bool = False
    """Two runs on the same machine give the same bits: deterministic kernels, and nothing that goes by measured times
    (needs fusion.policy=serial)."""
    resume_mode: str = "auto"
    """auto goes on from the newest complete checkpoint of the run folder, disable starts afresh, the path of a
    global_step_N folder goes on from that one. Settings that differ from the run's take effect or are refused, with a
    table, before anything starts."""
    default_local_dir: str = "runs"
    """Run folders are {default_local_dir}/{project_name}/{experiment_name}."""


@dataclass
class ClusterConfig:
    """Ray and the devices it places work on."""

    device: str = "auto"
    """What the run works on:"""
    ray_address: str | None = None
    """A running Ray cluster (`auto` or host:port); null starts one for this run."""
    node_order: list[str] = field(default_factory=list)
    """Addresses, or beginnings of Ray's ids, of the nodes whose slots come first, in this order: neighbours in it
    exchange the most. Others follow, the driver's own first; a name that no node has is refused when a run starts."""
    timeout_s: float = 1800.0
    """Longest time that a worker's start or one remote call may take, and that a run waits for slots that other jobs
    hold or, when it restarts, for lost nodes."""
    heartbeat_s: float = 60.0
    """A rollout engine that for so long does not answer, or stands still with samples at hand, is killed and replaced;
    so is a trainer rank that does so while it scores or trains, and the run goes on from its last checkpoint. Whoever
    computes may take longer. Raise it to stop in a debugger; on GPUs it has to exceed the longest layer, and a rank's
    first calls, which may compile, get five times as much."""
    max_restarts: int = 3
    """Times that each rollout engine is replaced when it is lost, and that the run restarts from its last checkpoint
    when a trainer rank is; 0: the first such loss ends the run."""
    drain: list[int] = field(default_factory=list)
    """Slots that get no work of their own, by their numbers, from the start on; `rlfuse slots` changes that while the
    run goes on."""


@dataclass
class AlertsConfig:
    """When to call for a person: a line at the terminal and a wandb alert. null turns one off; one whose metrics are
    missing for five steps says so."""

    reward_drop: float | None = 0.3
    """Mean reward below its best, as a share of the range of all rewards seen."""
    entropy_share: float | None = 0.1
    """Entropy of all responses (response/entropy) below this share of the first steps'."""
    ppo_kl: float | None = 0.1
    """Change of the policy within a step (actor/ppo_kl)."""
    kl: float | None = None
    """KL to the reference (critic/kl, actor/kl_loss); what is much depends on the estimator and on lengths."""
    grad_norm_factor: float | None = 10.0
    """Gradient norm over the median of the last 20 steps."""
    zero_spread: float | None = 0.95
    """Share of groups whose rewards are all equal (rollout.n > 1)."""
    reward_failures: float | None = 0.02
    """Share of a step's samples without a reward."""
    log_probs_diff: float | None = 1.0
    """training/rollout_log_probs_diff_max over what rounding explains: 1e-3 nats with model.dtype=float32, 2 with
    bfloat16; not judged where log-probs are of other weights or of truncated sampling."""
    idle_share: float | None = 0.5
    """Share of the slots' time without work, start-up left out."""
    slow_worker_s: float | None = 240.0
    """Seconds for which one worker or node is apart from its peers (slower at the same work, stalled for memory or
    disks, ...), or 12 steps if they are shorter; null: nobody looks."""
