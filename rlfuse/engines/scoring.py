"""One kind of scoring, whoever does it: rewards by the reward workers, the per-token passes by the trainer.

Role: called by the executor with finished samples; the results are written to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfuse.fusion.decisions import Score
from rlfuse.protocols import Engines
from rlfuse.samples import Sample

PASSES = {"old_log_prob": ("actor", "old_log_probs"), "ref": ("ref", "ref_log_probs"), "values": ("critic", "values")}
"""Kind -> the model whose forward pass it is, and the tensor that samples gain."""


async def score(engines: Engines, decision: Score, samples: Sequence[Sample]) -> None:
    """Kind `reward`, `old_log_prob`, `ref` or `values`. The samples gain a reward, or a tensor of that pass."""
    kind, slot = decision.kind, decision.slot
    if kind == "reward":
        for sample, reward in zip(samples, await engines.reward.score(samples), strict=True):
            sample.reward = reward
        return
    rows, trainer = [sample.row() for sample in samples], engines.trainer
    if kind == "values":
        keep(kind, samples, await trainer.values(rows, slot))
    else:
        keep(kind, samples, await trainer.log_probs(model_of(kind), rows, slot))


def model_of(kind: str) -> str:
    """The model whose pass it is."""
    return PASSES[kind][0]


def keep(kind: str, samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> None:
    """Write what a pass gave, in the order of the samples, to them."""
    for sample, array in zip(samples, arrays, strict=True):
        sample.tensors[PASSES[kind][1]] = array
