"""Scenes for property tests: small jobs and machines of every kind. `playing.play` runs one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from rlfuse.algorithms.advantages import ESTIMATORS
from rlfuse.config.schema import Config, FilterGroups
from rlfuse.costs.model import Costs
from rlfuse.fusion.decisions import Settings


@dataclass(frozen=True)
class Scene:
    """A job on a machine, small enough to run hundreds of times."""

    policy: str = "stream"
    slots: int = 2
    batch: int = 4
    siblings: int = 2
    mini_batch: int = 2
    epochs: int = 1
    estimator: str = "grpo"
    reference: bool = False
    old_log_probs: str = "trainer"
    data: str = "exact"
    excess: float = 0.5
    prompts: int = 12
    steps: int = 1
    costs: Costs = field(default_factory=lambda: Costs(max_tokens=50))
    settings: Settings = field(default_factory=Settings)
    known: bool = False
    failing: int = 0
    """Percentage of samples without a reward."""
    zero: int = 0
    """Percentage of samples without advantage; the actor skips them unless there is a KL loss (`reference`)."""
    batches: int | None = None
    """Maximum number of batches for dynamic sampling; 0: no limit; None: no dynamic sampling."""
    lost: tuple[float, ...] = ()
    """Times at which engines 0, 1, ... are lost."""
    drained: tuple[int, ...] = ()
    """Slots that are drained from the start."""
    changes: tuple[tuple[float, int], ...] = ()
    """(time, slot): the slot is drained, or restored if it was drained."""
    seed: int = 0

    def config(self) -> Config:
        config = Config()
        config.data.train_batch_size, config.data.max_response_length = self.batch, self.costs.max_tokens
        config.rollout.n, config.actor.ppo_mini_batch_size, config.actor.ppo_epochs = (
            self.siblings,
            self.mini_batch,
            self.epochs,
        )
        config.algorithm.adv_estimator, config.algorithm.old_log_probs = self.estimator, self.old_log_probs
        config.actor.use_kl_loss = self.reference
        config.training.pipeline_parallel_size = 2 if self.settings.pipelined else 1
        config.algorithm.filter_groups = FilterGroups(self.batches is not None, self.batches or 0)
        config.trainer.val_before_train, config.trainer.save_freq = False, 0
        return config


@st.composite
def scenes(draw, data: str = "exact", steps: int = 1, **fixed) -> Scene:
    """Strategy that draws small jobs and machines of every kind."""
    slots, batch, zero = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 4))
    costs = Costs(
        max_sequences=draw(st.integers(1, 8)),
        flat_batch=draw(st.integers(1, 4)),
        kv_tokens=draw(st.sampled_from([40, 200, 1 << 30])),
        max_tokens=50,
        score_call_s=draw(st.sampled_from([0.0, 0.01, 0.2])),
        train_call_s=draw(st.sampled_from([0.0, 0.2])),
        link_bytes_per_s=draw(st.sampled_from([0.0, 1e9])),
    )
    old_log_probs = draw(st.sampled_from(["trainer", "engine"]))
    # With engines' log-probs the actor learns before generation ends; then the last engine can't be replaced.
    spared = 0 if old_log_probs == "trainer" and data == "exact" else 1
    settings = Settings(
        credit_samples=draw(st.sampled_from([1, 2, 5, 1 << 30])),
        credit_tokens=draw(st.sampled_from([1, 60, 1 << 40])),
        lockstep=zero >= 3,
        lockstep_backward=zero >= 2,
        pipelined=zero == 4,
        threshold=draw(st.sampled_from([0.0, 0.3, 1.0])),
        longest_first=draw(st.booleans()),
    )
    scene = Scene(
        slots=slots,
        batch=batch,
        siblings=draw(st.integers(1, 3)),
        mini_batch=draw(st.integers(1, batch)),
        epochs=draw(st.integers(1, 2)),
        estimator=draw(st.sampled_from(tuple(ESTIMATORS))),
        reference=draw(st.booleans()),
        old_log_probs=old_log_probs,
        data=data,
        excess=draw(st.sampled_from([0.2, 0.5, 1.5])),
        prompts=batch * draw(st.integers(4, 6)) + draw(st.integers(0, batch - 1)),
        steps=steps,
        costs=costs,
        settings=settings,
        known=draw(st.booleans()),
        failing=draw(st.sampled_from([0, 0, 20, 60])),
        zero=draw(st.sampled_from([0, 0, 30, 70, 100])),
        lost=tuple(draw(st.lists(st.floats(0.01, 1.0), max_size=slots - spared))),
        seed=draw(st.integers(0, 1 << 20)),
        drained=(slots - 1,) if slots > 1 and draw(st.integers(0, 3)) == 3 else (),
    )
    return replace(scene, **fixed)
