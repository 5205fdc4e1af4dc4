"""The board of one step: where each sample stands, from waiting to trained. Bookkeeping only, no effects.

Role: the controller writes what happened (`start`, `finished`, `scored`, `trained`), the policy reads a `Snapshot`.
Invariants: a sample is generated once, scored once per kind and trained in exactly one mini-batch of each epoch, whose
members are fixed by prompt order before anything runs; only `extend` (dynamic sampling) may add groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlfuse.fusion.decisions import Decision, Generate, Score, Snapshot
from rlfuse.samples import Group, Response, Reward, RewardFailure, Sample


class Board:
    """`kinds`: kinds of scoring every sample needs; `passes`: how often the step trains on its samples (0: not at all).

    `purpose`: what caused the work, for its events: `training` or `testing`.

    Every update is O(1) per sample, so that a step of many thousands of samples stays cheap to decide on.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        slots: int,
        kinds: Sequence[str],
        passes: int,
        mini_batch_groups: int = 1,
        purpose: str = "training",
    ):
        self.purpose = purpose
        self.groups: list[Group] = []
        self.samples: dict[str, Sample] = {}
        self.batches = 0
        self._kinds, self.passes, self._mini_batch_groups = tuple(kinds), passes, mini_batch_groups
        self._loads, self._slot_of = [0] * slots, {}
        self._waiting: dict[int, int] = {}
        self._unscored: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
        self._running: set[str] = set()
        self._open = 0  # generations and scorings still to come
        self._kept: set[int] | None = None
        self._mini_batches: list[list[Group]] | None = None
        self._trained = 0
        self.extend(groups)

    def extend(self, groups: Sequence[Group]) -> None:
        """Add a batch of groups to the step."""
        self.batches += 1
        self._mini_batches = None
        for group in groups:
            self._waiting[len(self.groups)] = len(group.samples)
            self.groups.append(group)
            self.samples |= {sample.id: sample for sample in group.samples}
            self._open += len(group.samples) * (1 + len(self._kinds))

    # What happens ------------------------------------------------------------------------------------------------

    def start(self, decision: Decision) -> None:
        """A decision is being carried out."""
        if isinstance(decision, Generate):
            for group in decision.groups:
                self._loads[decision.slot] += self._waiting.pop(group)
                self._slot_of |= {sample.id: decision.slot for sample in self.groups[group].samples}
        elif isinstance(decision, Score):
            self._running.add(decision.kind)
            for sample in decision.samples:
                del self._unscored[decision.kind][sample]
        else:
            self._running.add("train")

    def finished(self, sample_id: str, response: Response) -> None:
        """A rollout engine returned a sample."""
        self._loads[self._slot_of.pop(sample_id)] -= 1
        self._open -= 1
        self.samples[sample_id].response = response
        for unscored in self._unscored.values():
            unscored[sample_id] = None

    def scored(self, decision: Score) -> None:
        """A scoring call returned; its results are on the samples."""
        self._running.discard(decision.kind)
        self._open -= len(decision.samples)

    def trained(self) -> None:
        """An optimizer step was taken."""
        self._running.discard("train")
        self._trained += 1

    def keep(self, groups: Sequence[int], at_most: int) -> None:
        """Train on the first `at_most` of these groups only."""
        self._kept = set(groups[:at_most])
        self._mini_batches = None

    # What stands -------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What a policy may know."""
        return Snapshot(
            loads=tuple(self._loads),
            waiting=tuple(self._waiting.items()),
            unscored={kind: tuple(ids) for kind, ids in self._unscored.items()},
            running=frozenset(self._running),
            trainable=self._trained if self.all_scored and not self.done else None,
        )

    @property
    def all_scored(self) -> bool:
        """Every sample is generated and has every kind of score."""
        return self._open == 0

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._slot_of and not self._running

    @property
    def done(self) -> bool:
        """All scored, and trained as often as asked."""
        return self.all_scored and self._trained >= self.passes * len(self.mini_batches())

    def failures(self) -> list[tuple[Sample, RewardFailure]]:
        """Samples without a reward; they are left out of their groups."""
        return [(s, s.reward) for s in self.samples.values() if isinstance(s.reward, RewardFailure)]

    def kept(self) -> list[Group]:
        """Groups to train on, with the samples that have a reward; empty groups are gone."""
        kept = [
            Group(group.prompt, [sample for sample in group.samples if isinstance(sample.reward, Reward)])
            for i, group in enumerate(self.groups)
            if self._kept is None or i in self._kept
        ]
        return [group for group in kept if group.samples]

    def mini_batches(self) -> list[list[Group]]:
        """Groups per optimizer step, in prompt order; known once all is scored."""
        if self._mini_batches is None:
            groups, size = self.kept(), self._mini_batch_groups
            self._mini_batches = [groups[i : i + size] for i in range(0, len(groups), size)]
        return self._mini_batches

    def mini_batch(self, number: int) -> list[Sample]:
        """Samples of the `number`-th optimizer step of this training step; epochs follow one another."""
        batches = self.mini_batches()
        return [sample for group in batches[number % len(batches)] for sample in group.samples]
