"""Kinds of scoring: which model computes each per-token pass, and which tensor of a sample it fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlfuse.samples import PASSES, Sample

KIND_OF = {model: kind for kind, (model, _) in PASSES.items()}


def model_of(kind: str) -> str:
    """The model whose pass it is."""
    return PASSES[kind][0]


def store_scores(kind: str, samples: Sequence[Sample], arrays: Sequence[np.ndarray]) -> None:
    """Write what a pass gave, in the order of the samples, to them."""
    for sample, array in zip(samples, arrays, strict=True):
        sample.tensors[PASSES[kind][1]] = array
