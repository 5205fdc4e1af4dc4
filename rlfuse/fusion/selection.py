"""Select the prompts that a step draws and the groups that it trains on (`fusion.data`).

- `exact`: every group of the batch.
- `tail_batching` (reordered): the step ends when a batch of groups is finished; interrupted prompts are collected into
  a later batch (RollPacker, 2025).
- `over_sampling` (off-policy): the same, but interrupted prompts restart from scratch in the next step.
- `partial_rollout` (off-policy): unfinished responses continue under the next weights (Kimi k1.5, arXiv 2501.12599).
- `one_step_off` (off-policy): idle slots start the next batch under the current weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

from rlfuse.config.rollout import HISTORY
from rlfuse.samples import Group, Partial, Prompt

LABELS = {
    "exact": "exact",
    "tail_batching": "reordered",
    "over_sampling": "off-policy",
    "partial_rollout": "off-policy",
    "one_step_off": "off-policy",
}
EXACT, MISMATCHED = "exact", "mismatched"
"""MISMATCHED replaces the label if engines and trainer disagree (`step.agreement`)."""
STRENGTH = (EXACT, "exact marginals", "reordered", "off-policy", MISMATCHED)  # all labels, strongest guarantee first
SET_ASIDE = "fusion/prompts_set_aside"
CARRY_OVER = ("partial_rollout", "one_step_off")  # modes that need importance correction


def label(data: str, quantization: str | None = None, draft: str = "ngram") -> str:
    """Return the exactness label of a run. Quantized engines sample from another policy, so they are off-policy.

    With rollout.draft=history each response is a sample of the policy, but those to the same prompt are correlated.
    """
    if quantization is not None:
        return "off-policy"
    return "exact marginals" if data == EXACT and draft == HISTORY else LABELS[data]


def drawn_at_most(data: str, excess: float, batch: int) -> int:
    """Return the maximum number of (distinct) prompts of one step."""
    if data == "one_step_off":
        return 2 * batch
    return batch if data == "exact" else ceil(batch * (1 + excess))


def weakest(labels: Iterable[str]) -> str:
    """Return the weakest of the labels, which holds for the whole run."""
    return max(labels, key=STRENGTH.index)


def labels_in(row: Container[str]) -> list[str]:
    """Return the labels in a row of metrics."""
    return [name for name in STRENGTH if f"fusion/{name}" in row]


def choice(fusion: Mapping[str, Any]) -> str:
    """Return the value of `fusion=`: the policy, or the data selection if it is not exact."""
    return fusion["policy"] if fusion["data"] == EXACT else fusion["data"]


@dataclass(frozen=True, slots=True)
class Draw:
    """Groups of a step. Generation ends when `needed` of the first `eligible` are finished; the rest are returned."""

    groups: list[Group]
    eligible: int
    needed: int
    partials: dict[str, Partial]  # sample id -> partial response from an earlier step


class Source(Protocol):
    """Source of prompts (`rlfuse.data.prompts.PromptSource`)."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    def next_batch(self) -> list[Prompt]: ...

    def upcoming(self) -> list[Prompt]: ...

    def update(self, groups: Sequence[Group]) -> None: ...


class Selection:
    """Selection of groups for steps of `batch` prompts. Calls of `draw` and `return_unused` alternate."""

    def __init__(self, data: str, excess: float, batch: int, source: Source):
        self.data, self.excess, self.batch, self._source = data, excess, batch, source
        self._cut_off: list[Prompt] = []  # interrupted, to be generated again
        self._new: list[Prompt] = []  # of the latest batch, not drawn yet
        self._repeated: list[Prompt] = []
        self._carried: list[Group] = []
        self._partials: dict[str, Partial] = {}

    def draw(self, make: Callable[[list[Prompt]], list[Group]]) -> Draw:
        batch, more = self.batch, drawn_at_most(self.data, self.excess, self.batch)
        tail = self.data == "tail_batching" and len({prompt.index for prompt in self._cut_off}) >= batch
        if tail or self.data == "exact":
            return Draw(make(self._take(batch, again=tail)), batch, batch, {})
        if self.data in ("tail_batching", "over_sampling"):
            return Draw(make(self._take(more, again=self.data == "over_sampling")), more, batch, {})
        carried, self._carried = self._carried, []
        partials, self._partials = self._partials, {}
        eligible = batch if self.data == "one_step_off" else more
        fresh = make(self._take(max(0, more - len(carried)), again=True, excluding=carried))
        return Draw(carried + fresh, eligible, batch, partials)

    def upcoming(self) -> list[Prompt]:
        """Return the prompts that the next step will draw, unless some are returned before."""
        return (self._new or self._source.upcoming())[: self.batch]

    def return_unused(self, groups: Sequence[Group], partials: dict[str, Partial]) -> None:
        if self.data in CARRY_OVER:
            self._carried, self._partials = list(groups), partials
            for sample in (sample for group in groups for sample in group.generated):
                sample.reward, sample.tensors = None, {}
        else:
            self._cut_off += [group.prompt for group in groups]

    @property
    def set_aside(self) -> list[int]:
        return sorted({prompt.index for prompt in self._cut_off})

    def metrics(self) -> dict[str, float]:
        count = len(self.set_aside)
        return {SET_ASIDE: count} if count or self.data in ("tail_batching", "over_sampling") else {}

    def _take(self, count: int, again: bool, excluding: Sequence[Group] = ()) -> list[Prompt]:
        """Return `count` distinct prompts: interrupted ones first (if `again`), then new ones."""
        taken: list[Prompt] = []
        used = {group.prompt.index for group in excluding}
        while len(taken) < count:
            if len(self._repeated) > 4 * (count + len(used)):
                raise ValueError(
                    f"data.train_files has only {len(used)} distinct prompts, but fusion.data={self.data} draws "
                    f"{count} per step. Add data, or lower data.train_batch_size or fusion.excess."
                )
            if not (again and self._cut_off) and not self._new:
                self._new = list(self._source.next_batch())
            source = self._cut_off if again and self._cut_off else self._new
            prompt = source.pop(0)
            if prompt.index in used:  # an epoch ended in between: keep it for the next step
                self._repeated.append(prompt)
            else:
                used.add(prompt.index)
                taken.append(prompt)
        self._new, self._repeated = self._repeated + self._new, []
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the pending prompts; partial responses are not saved."""
        again = [prompt.index for prompt in self._cut_off] + [group.prompt.index for group in self._carried]
        return {"again": again, "new": [prompt.index for prompt in self._new]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        by_index = {prompt.index: prompt for prompt in self._source.prompts}
        self._cut_off, self._new = (
            [by_index[index] for index in state[name] if index in by_index] for name in ("again", "new")
        )
