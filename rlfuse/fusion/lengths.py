"""Predict response lengths from earlier steps and finished samples of a prompt, and the end of generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from statistics import fmean

import numpy as np

from rlfuse.costs.model import Costs

PRIOR = 2.0  # weight of a prompt's history, in finished samples


class Lengths:
    """Moving averages of the response length, per prompt and overall. Recent steps count more, as the policy drifts."""

    def __init__(self, longest: int, decay: float = 0.5):
        self._longest, self._decay = longest, decay
        self._mean: float | None = None
        self._of_prompt: dict[int, float] = {}
        self.recorded: list[float] = []  # lengths of the last step, for tuning
        self.error: float | None = None  # RMS of log(length / expectation), if most prompts were known

    def knows(self, prompt: int) -> bool:
        return prompt in self._of_prompt

    def expect(self, prompt: int) -> float:
        unknown = self._mean if self._mean is not None else self._longest / 4
        return min(self._of_prompt.get(prompt, unknown), self._longest)

    def learn(self, lengths: Mapping[int, Sequence[float]]) -> None:
        self.recorded = [length for each in lengths.values() for length in each]
        if not self.recorded:
            return
        known = {prompt: max(1.0, fmean(each)) for prompt, each in lengths.items() if self.knows(prompt)}
        squares = [log(mean / max(1.0, self.expect(prompt))) ** 2 for prompt, mean in known.items()]
        self.error = sqrt(fmean(squares)) if 2 * len(known) > len(lengths) else None
        for prompt, each in lengths.items():
            self._of_prompt[prompt] = self._blend(self._of_prompt.get(prompt), float(np.mean(each)))
        self._mean = self._blend(self._mean, float(np.mean(self.recorded)))

    def _blend(self, before: float | None, now: float) -> float:
        return now if before is None else before + self._decay * (now - before)

    def state_dict(self) -> dict:
        return {"mean": self._mean, "of_prompt": {str(k): v for k, v in self._of_prompt.items()}}

    def load_state_dict(self, state: dict) -> None:
        self._mean = state["mean"]
        self._of_prompt = {int(k): v for k, v in state["of_prompt"].items()}


def with_sibling(expected: float, finished: int, length: int) -> float:
    """Return the expected length of a sample after the `finished`-th sample of its prompt ended with `length`."""
    weight = PRIOR + finished - 1
    return (expected * weight + length) / (weight + 1)


def seconds_to_generate(remaining: np.ndarray, slots: float, other_s: float, costs: Costs) -> float:
    """Return the minimum seconds in which `slots` slots generate `remaining` tokens and do `other_s` seconds of work.

    The load is ideally balanced: the result is the least G with total work <= slots * G. A sample of r tokens that ends
    within G seconds allows a batch of `batch_within(G / r)` and uses r steps / batch of an engine's time.
    """
    if not len(remaining):
        return 0.0
    longest_step = costs.decode_step(costs.max_sequences, 0.0)
    low = float(remaining.max()) * costs.step_base_s
    high = low + (longest_step * float(remaining.sum()) + other_s) / slots
    for _ in range(20):
        middle = (low + high) / 2
        step = np.minimum(np.maximum(middle / remaining, costs.step_base_s), longest_step)
        batch: np.ndarray | float = costs.max_sequences
        if costs.step_per_sequence_s > 0:
            batch = np.minimum(costs.flat_batch + (step - costs.step_base_s) / costs.step_per_sequence_s, batch)
        fits = float((remaining * step / batch).sum()) + other_s <= slots * middle
        low, high = (low, middle) if fits else (middle, high)
    return high
