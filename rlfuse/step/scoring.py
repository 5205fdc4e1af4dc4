"""Kinds of scoring: the model that computes each per-token pass, and the tensor of a sample that it fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfuse.samples import PASSES, Sample

KIND_OF = {model: kind for kind, (model, _) in PASSES.items()}


def model_of(kind: str) -> str:
    """Return the model that computes a kind of scoring."""
    return PASSES[kind][0]


def store_scores(kind: str, samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> None:
    """Store the results of a pass in its samples, in order."""
    for sample, array in zip(samples, arrays, strict=True):
        sample.tensors[PASSES[kind][1]] = array
