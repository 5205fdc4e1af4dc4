"""Custom metrics (`trainer.metrics`): functions of the finished samples of a step.

Functions receive copies. An error, a non-finite value or a call longer than `TIME_LIMIT_S` affects this metric only and
is reported once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from rlfuse.config.custom_errors import definition_line, headline, text, user_traceback
from rlfuse.config.custom_functions import METRICS, arguments_of
from rlfuse.config.custom_modules import load
from rlfuse.config.schema import Config
from rlfuse.rewards.api.items import Item, item_of_sample, private_copy
from rlfuse.rewards.api.results import InvalidResult, number
from rlfuse.samples import Reward, Sample

TRAINING, HELD_OUT = "custom", "val-custom"
"""Prefixes of metric names, for training samples and for validation samples."""
TIME_LIMIT_S = 30.0
CONTINUES = "The run continues without this metric; reported once."
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSample(Item):
    """Finished sample: the fields of reward functions (`Item`), its reward and finish reason."""

    prompt_index: int = 0
    """Row of the data, the same for all responses to a prompt."""
    finish_reason: str = ""
    """`stop` or `length`."""
    reward: float | None = None
    """None if a reward function failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """Reward parts: the unscaled score of each function, and the other numbers that it returned."""


def finished(sample: Sample, prompt_key: str = "prompt") -> FinishedSample:
    """Return a sample as metric functions receive it. `prompt_key`: `data.prompt_key`."""
    item, reward = item_of_sample(sample, prompt_key), sample.reward
    scored = isinstance(reward, Reward)
    return FinishedSample(
        **{each.name: getattr(item, each.name) for each in fields(item)},
        prompt_index=sample.prompt.index,
        finish_reason=sample.response.finish_reason,
        reward=reward.value if scored else None,
        parts=copy.copy(reward.parts) if scored else {},
    )


def metrics_by_name(returned: Any) -> dict[str, Any]:
    """Return the returned numbers by name; a single number has the empty name."""
    return {text(str(key)): each for key, each in returned.items()} if isinstance(returned, dict) else {"": returned}


class CustomMetrics:
    """Functions of `trainer.metrics`. Raises ConfigError for an invalid one.

    `say`: prints to the terminal; `consequence`: text after the problem.
    """

    def __init__(self, config: Config, say: Say, consequence: str = CONTINUES):
        self._functions = {
            value: partial(load(METRICS, value), **arguments_of(config, METRICS, value))
            for value in config.trainer.metrics
        }
        self._prompt_key, self._say, self._consequence = config.data.prompt_key, say, consequence
        self._told: set[tuple[str, str]] = set()

    def of(self, samples: Sequence[Sample], section: str = TRAINING) -> dict[str, float]:
        found: dict[str, float] = {}
        items = [finished(sample, self._prompt_key) for sample in samples] if self._functions else []
        for value, function in list(self._functions.items()):
            name = value.rpartition(":")[2]
            for figure, given in self._asked(value, function, items).items():
                try:
                    found["/".join([section, name, *([figure] if figure else [])])] = number(given, "a metric")
                except InvalidResult as error:
                    self._tell(value, figure, f"{f'{figure}: ' if figure else ''}{error}")
        return found

    def _asked(self, value: str, function: Callable[..., Any], items: Sequence[FinishedSample]) -> dict[str, Any]:
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(function([private_copy(item, item.columns) for item in items]))
            except BaseException as error:  # SystemExit too
                answers.append(error.with_traceback(error.__traceback__.tb_next))

        thread = threading.Thread(target=ask, daemon=True, name=f"metric {value}")
        thread.start()
        thread.join(TIME_LIMIT_S)
        if not answers:
            del self._functions[value]
            self._tell(value, "", f"took longer than {TIME_LIMIT_S:g} s and is disabled")
            return {}
        [answer] = answers
        if isinstance(answer, BaseException):
            raised = user_traceback(answer, definition_line(function))
            self._tell(value, "", f"raised {headline(answer)}", f"\n{raised}")
            return {}
        return metrics_by_name(answer)

    def _tell(self, value: str, figure: str, what: str, more: str = "") -> None:
        if (value, figure) not in self._told:
            self._told.add((value, figure))
            self._say(f"{METRICS}={value}: {what}. {self._consequence}{more}")
