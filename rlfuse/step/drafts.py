"""Earlier responses as drafts of a run's samples, and their comparison with those of a repeated step.

Role: the controller records each finished response. Samples with the same prompt and seed get it as a draft, with those
of other samples of the prompt.
Invariant: engines verify drafts, which change responses only by rounding. Waits: for nothing but small writes to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlfuse.samples import Group, Sample

OTHER_RESPONSES = 2
"""Maximum number of other responses in the drafts of a sample (measured: `tests/benchmarks/README.md`)."""


class StoredResponse(Protocol):
    """A response of an earlier generation."""

    @property
    def step(self) -> int: ...

    @property
    def token_ids(self) -> np.ndarray: ...


class StoredResponses(Protocol):
    """Last responses by `Sample.draft_key` (`rlfuse.run_folder.response_store.StoredResponses`)."""

    def find(self, key: int) -> StoredResponse | None: ...


class ResponseStore(StoredResponses, Protocol):
    """The same, of a run that adds responses."""

    @property
    def dropped(self) -> int: ...

    def add(self, step: int, key: int, token_ids: np.ndarray) -> None: ...


def attach(stored: StoredResponses, groups: Sequence[Group]) -> None:
    """Set the drafts of the samples that have a stored response: it, and others to the prompt."""
    for group in groups:
        found = [stored.find(sample.draft_key) for sample in group.generated]
        responses = [None if each is None else each.token_ids for each in found]
        for place, (sample, own) in enumerate(zip(group.generated, responses, strict=True)):
            if own is not None:
                others = [each for each in (*responses[place + 1 :], *responses[:place]) if each is not None]
                sample.drafts = (own, *others[:OTHER_RESPONSES])


@dataclass(kw_only=True)
class Drafts:
    """Drafts from `store`; None: there are none, and no responses are stored."""

    store: ResponseStore | None = None
    are_wanted: bool = False
    """Samples get drafts, which engines use unless they can't verify them."""
    repeated_until: int = 0
    """Last step that ran, at least in part, before this attempt; 0 once a repeated step differed."""
    epoch_limit_mb: int = 0
    """Size of the store if it should hold the responses of an epoch; 0 once it was reported as too small."""
    say: Callable[[str], None] = print
    _identical: list[bool] = field(default_factory=list)
    """Of the responses of a repeated step: whether they are those of the first time."""

    def attach(self, groups: Sequence[Group]) -> None:
        """Set the drafts of these samples, if they are wanted."""
        if self.store is not None and self.are_wanted:
            attach(self.store, groups)

    def record(self, sample: Sample) -> None:
        """Store the response of a finished sample; compare it with the stored one if its step is repeated."""
        sample.drafts = ()
        if self.store is None:
            return
        token_ids = sample.require_response().token_ids
        if 0 < sample.step <= self.repeated_until:
            stored = self.store.find(sample.draft_key)
            if stored is not None and stored.step == sample.step:
                self._identical.append(np.array_equal(stored.token_ids, token_ids))
        self.store.add(sample.step, sample.draft_key, token_ids)

    def report(self, step: int) -> None:
        """Print whether the responses of a repeated step are those of the first time, and whether drafts get lost."""
        if self.epoch_limit_mb and self.store is not None and self.store.dropped:
            self.say(
                f"rollout.draft_store_mb={self.epoch_limit_mb} is reached: the oldest responses were dropped, and "
                "their prompts are generated without drafts. Raise it until the responses of an epoch fit."
            )
            self.epoch_limit_mb = 0
        count, identical = len(self._identical), sum(self._identical)
        self._identical.clear()
        if not count:
            return
        if identical == count:
            return self.say(f"step {step} was repeated: all {count} stored responses are identical")
        self.repeated_until = 0  # later steps differ too
        self.say(
            f"Step {step} was repeated: {count - identical} of {count} stored responses differ. Settings have changed, "
            "weights are not bitwise those of the first time, or engines round differently in other batches. The step "
            "is valid; only trainer.deterministic=true repeats steps bitwise."
        )
