"""Names of the metrics of offline tasks: what the terminal, lists, alerts and summaries show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfuse.config.rewards import MODEL_PART


@dataclass(frozen=True, slots=True)
class OfflineMetrics:
    """Metrics of a task."""

    task: str
    model: str
    """Prefix of its metrics, and folder of the trained model in checkpoints."""
    score: str
    """Main metric; higher is better."""
    shown: tuple[str, ...] = ()
    """Further metrics in a step's line."""

    @property
    def loss(self) -> str:
        return f"{self.model}/loss"

    @property
    def validation(self) -> str:
        return f"val-core/{self.task}/{self.short(self.score)}"

    def short(self, name: str) -> str:
        """Return a metric's name without the model."""
        return name.removeprefix(f"{self.model}/")

    def fields(self) -> tuple[str, ...]:
        """Return the metrics of a step's line."""
        return (self.loss, self.score, *self.shown, f"{self.model}/grad_norm")


OFFLINE = {
    each.task: each
    for each in (
        OfflineMetrics("sft", "actor", "actor/mean_token_accuracy"),
        OfflineMetrics("dpo", "actor", "rewards/accuracies", ("rewards/margins",)),
        OfflineMetrics("reward_model", MODEL_PART, f"{MODEL_PART}/acc", (f"{MODEL_PART}/margin",)),
    )
}
LOSSES = tuple(dict.fromkeys(each.loss for each in OFFLINE.values()))
SCORES = tuple(each.score for each in OFFLINE.values())


def task_of(metrics: Mapping[str, float]) -> OfflineMetrics | None:
    """Return the offline task whose step has these metrics; None for RL."""
    return next((each for each in OFFLINE.values() if each.score in metrics), None)


def validation_names(names: OfflineMetrics, values: Mapping[str, float]) -> dict[str, float]:
    """Return validation metrics under their names: val-core for the main one, val-aux for the others."""
    main = names.short(names.score)
    short = {names.short(name): value for name, value in values.items()}
    return {f"val-{'core' if name == main else 'aux'}/{names.task}/{name}": value for name, value in short.items()}
