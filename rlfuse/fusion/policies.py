"""When each piece of work runs: the fusion policies, pure functions of a snapshot.

Role: `fusion=<name>` picks one; the controller calls it. Both here are exact: they decide when, never what.
- `serial`: generation, each kind of scoring, training, one after the other, as other systems do;
- `stream`: a sample is scored as soon as it is finished, while others still generate.
"""

from __future__ import annotations

from rlfuse.fusion.decisions import Decision, Generate, Policy, Score, Snapshot, Train


def serial(view: Snapshot) -> list[Decision]:
    """One stage at a time over the whole batch."""
    if view.waiting:
        return admit(view)
    if view.generating or view.running:
        return []
    return _score(view)[:1] or _train(view)


def stream(view: Snapshot) -> list[Decision]:
    """Every kind of scoring takes what is finished whenever it is free."""
    return admit(view) + _score(view) or _train(view)


def admit(view: Snapshot) -> list[Decision]:
    """Every waiting group to the slot with the fewest unfinished samples, groups in order."""
    loads = list(view.loads)
    share: list[list[int]] = [[] for _ in loads]
    for group, samples in view.waiting:
        slot = min(range(len(loads)), key=loads.__getitem__)
        share[slot].append(group)
        loads[slot] += samples
    return [Generate(slot, tuple(groups)) for slot, groups in enumerate(share) if groups]


def _score(view: Snapshot) -> list[Decision]:
    return [Score(kind, ids) for kind, ids in view.unscored.items() if ids and kind not in view.running]


def _train(view: Snapshot) -> list[Decision]:
    return [] if view.trainable is None or view.running else [Train(view.trainable)]


POLICIES: dict[str, Policy] = {"serial": serial, "stream": stream}
