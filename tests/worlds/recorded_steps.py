"""Three recorded runs of the quickstart (two slots on two cores of an AMD EPYC, 23 November 2026).

`recorded_steps.npz` has a row for each piece of work of an engine or rank (`rlfuse.health.series`), written by
`python tests/worlds/recorded_steps.py RUN_DIR ...`, without agents' samples. `DrawnRun` builds longer runs from some of
the slots, with steps drawn from the recorded ones and optionally one slowed slot.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rlfuse.costs.model import Costs
from rlfuse.costs.spans import is_work
from rlfuse.events import Span, read_events

FILE = Path(__file__).with_suffix(".npz")
KINDS = ("decode", "old_log_prob", "ref", "values", "forward", "backward")
NUMBERS = ("steps", "batch", "context", "prefill_tokens")
COLUMNS = ("run", "slot", "step", "kind", "start", "seconds", "tokens", "critic", *NUMBERS)
SLOTS = [(run, slot) for run in range(3) for slot in range(2)]


def keep(folders: list[Path]) -> None:
    """Write the file for runs with two slots."""
    rows = []
    for run, folder in enumerate(folders):
        spans = read_events(folder / "events.jsonl")
        begins = {span.step: span.start for span in spans if span.kind == "step"}
        for span in spans:
            if is_work(span) and span.kind in KINDS and span.start >= begins.get(span.step, float("inf")):
                attributes = span.attributes
                numbers = [attributes.get(name, 0) for name in NUMBERS]
                where = (run, int(span.where.partition("/")[2]), span.step, KINDS.index(span.kind))
                times = (round(span.start - begins[span.step], 5), round(span.seconds, 6))
                rows.append((*where, *times, span.tokens, attributes.get("model") == "critic", *numbers))
    columns = zip(COLUMNS, np.array(rows, np.float32).T, strict=True)
    np.savez_compressed(FILE, **{name: column for name, column in columns})


def recorded() -> dict[tuple[int, int, int], list[Span]]:
    """Return (run, slot, step) -> spans, with times from the step's start."""
    file = np.load(FILE)
    found: dict[tuple[int, int, int], list[Span]] = {}
    for values in zip(*(file[name].tolist() for name in COLUMNS), strict=True):
        row = dict(zip(COLUMNS, values, strict=True))
        kind, start = KINDS[int(row["kind"])], row["start"]
        attributes = {name: int(row[name]) for name in NUMBERS} if kind == "decode" else {"degree": 1}
        if kind in ("forward", "backward"):
            attributes["model"] = "critic" if row["critic"] else "actor"
        where = "rollout" if kind == "decode" else "trainer"
        span = Span(kind, where, start, start + row["seconds"], tokens=int(row["tokens"]), attributes=attributes)
        found.setdefault((int(row["run"]), int(row["slot"]), int(row["step"])), []).append(span)
    return found


class DrawnRun:
    """A run of `slots` recorded slots, `count` steps drawn with replacement; `kind` of fault: slow, jittery or None.

    The faulty slot is 1.4x to 3x slower for 20 to 36 steps, starting after a sixth to a third of the run; `jittery`: 3x
    to 6x in half to three quarters of these steps. (Below 1.4, the scatter of two cores hides it.)
    """

    costs = Costs()

    def __init__(self, seed: int, slots: int, kind: str | None = None, count: int = 60):
        rng = np.random.default_rng(seed)
        self._recorded = recorded()
        self._chosen = [SLOTS[i] for i in rng.permutation(len(SLOTS))[:slots]]
        self._steps = rng.integers(2, 17, count)
        self.odd, begins = int(rng.integers(slots)), int(rng.integers(count // 6, count // 3))
        ends, self._factors = begins + int(rng.integers(20, 37)), np.ones(count)
        if kind is not None:
            low, high = (1.4, 3) if kind == "slow" else (3, 6)
            hit = rng.random(count) < (1 if kind == "slow" else rng.uniform(0.5, 0.75))
            self._factors[begins:ends] = np.where(hit, np.exp(rng.uniform(np.log(low), np.log(high))), 1)[begins:ends]
        self.guilty = {f"{role}/{self.odd}" for role in ("rollout", "trainer")} if kind else set()
        self.homes: dict[str, str] = {}

    def steps(self):
        """Yield (number, start, end, spans, samples) of each step."""
        now = 0.0
        for number, (step, factor) in enumerate(zip(self._steps, self._factors, strict=True), 1):
            spans = []
            for slot, (run, which) in enumerate(self._chosen):
                longer = float(factor) if slot == self.odd else 1.0
                for each in self._recorded.get((run, which, int(step)), []):
                    start, end = now + each.start * longer, now + each.end * longer
                    where, attributes = f"{each.where}/{slot}", each.attributes
                    spans.append(Span(each.kind, where, start, end, number, tokens=each.tokens, attributes=attributes))
            start, now = now, max(span.end for span in spans) + 0.1
            yield number, start, now, spans, []


if __name__ == "__main__":
    keep([Path(name) for name in sys.argv[1:]])
