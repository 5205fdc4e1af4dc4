"""Count lost, replaced and skipped work from a run's spans, for the metrics `fault/*`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlfuse.events import Span

REPLACED = {
    "rollout": "engines_replaced",
    "reward": "reward_workers_replaced",
    "encoder": "encoder_ranks_replaced",
    "driver": "restarts",
}


def count_faults(spans: Iterable[Span]) -> Counter[str]:
    """What happened of the below, `restarts`, and `{actor,critic,reward_model}_steps_skipped`."""
    counts: Counter[str] = Counter()
    for span in spans:
        if span.kind == "lost":
            counts["engines_lost"] += 1
            counts["samples_reissued"] += len(span.samples)
        elif span.kind == "restart" and "error" not in span.attributes:
            counts[REPLACED[span.where.partition("/")[0]]] += 1
        elif span.kind == "optimizer" and span.attributes.get("skipped") and span.where == "trainer/0":
            counts[f"{span.attributes['model']}_steps_skipped"] += 1
    return +counts


def fault_metrics(counts: Counter[str]) -> dict[str, float]:
    """fault/*: so far in the run."""
    return {f"fault/{name}": float(count) for name, count in counts.items()}
