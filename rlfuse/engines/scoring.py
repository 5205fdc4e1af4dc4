"""One kind of scoring, whoever does it: rewards by the reward workers, the per-token passes by the trainer.

Role: called by the execution with finished samples; the results are written to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlfuse.engines.protocols import Engines
from rlfuse.fusion.decisions import Score
from rlfuse.samples import Sample


async def score(engines: Engines, decision: Score, samples: Sequence[Sample]) -> None:
    """Kind `reward`, `old_log_prob`, `ref` or `values`. The samples gain a reward, or a tensor of that pass."""
    kind, slot = decision.kind, decision.slot
    if kind == "reward":
        for sample, reward in zip(samples, await engines.reward.score(samples), strict=True):
            sample.reward = reward
        return
    rows = [sample.row() for sample in samples]
    if kind == "values":
        name, arrays = "values", await engines.trainer.values(rows, slot)
    elif kind == "old_log_prob":
        name, arrays = "old_log_probs", await engines.trainer.log_probs("actor", rows, slot)
    else:
        name, arrays = "ref_log_probs", await engines.trainer.log_probs("ref", rows, slot)
    for sample, array in zip(samples, arrays, strict=True):
        sample.tensors[name] = array
