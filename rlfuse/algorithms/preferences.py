"""Losses of preference pairs, for reward models (Bradley-Terry) and policies (DPO, IPO); calibration. Pure.

A pair's *gap* is the score of the chosen answer minus that of the rejected one. Bradley and Terry (1952) read it as
log-odds: under the model, the chosen answer is preferred with probability sigmoid(gap).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

BINS = 10


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -log sigmoid(gap - margin) and detached diagnostics, summed over pairs; all inputs [P].

    `acc` counts equal scores as half right. Margins demand a wider gap for pairs that annotators were surer of (Touvron
    et al. 2023, arXiv 2307.09288).
    """
    gaps = chosen - rejected
    loss = -logsigmoid(gaps - margins).sum()
    sums = {
        "loss": loss,
        "acc": torch.heaviside(gaps, gaps.new_tensor(0.5)).sum(),
        "margin": gaps.sum(),
        "chosen": chosen.sum(),
    }
    sums["rejected"] = rejected.sum()
    return loss, {name: total.detach().float() for name, total in sums.items()}


def dpo(
    log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor, beta: float, loss_type: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the DPO loss (Rafailov et al. 2023, arXiv 2305.18290) and detached diagnostics, summed over pairs.

    `log_probs`, `reference`, `lengths` [P, 2]: summed log-probs of chosen and rejected completions under the policy and
    the reference, and their tokens. `loss_type`: `sigmoid`, or `ipo` (Azar et al. 2023, arXiv 2310.12036) on means per
    token, as in TRL. Rewards are `beta` times the log-ratio to the reference.
    """
    ratios = log_probs - reference
    if loss_type == "sigmoid":
        loss = -logsigmoid(beta * (ratios[:, 0] - ratios[:, 1])).sum()
    else:
        means = ratios / lengths
        loss = (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square().sum()
    rewards = beta * ratios
    sums = {"loss": loss, "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).sum()}
    sums["rewards/margins"] = (rewards[:, 0] - rewards[:, 1]).sum()
    for side, name in enumerate(("chosen", "rejected")):
        sums |= {f"rewards/{name}": rewards[:, side].sum(), f"logps/{name}": log_probs[:, side].sum()}
    return loss, {name: total.detach().float() for name, total in sums.items()}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Accuracy of a reward model by confidence, in bins from 0.5 to 1."""

    accuracy: float
    loss: float
    """Bradley-Terry, without margins."""
    ece: float
    """Expected calibration error: |accuracy - confidence| of the bins, weighted by their pairs (Naeini et al. 2015)."""
    edges: np.ndarray
    """float64 [bins + 1]."""
    counts: np.ndarray
    """int64 [bins]: pairs."""
    confidences: np.ndarray
    """float64 [bins]: mean confidence, NaN where there is no pair."""
    accuracies: np.ndarray
    """float64 [bins]: fraction of correctly ordered pairs, NaN as above."""


def calibrate(gaps: np.ndarray, bins: int = BINS) -> Calibration:
    """Compute the calibration on the gaps of held-out pairs, [P]. A gap of 0 counts as half right.

    Confidence is the probability of the preferred answer, sigmoid(|gap|), so it is at least 0.5.
    """
    if not len(gaps) or not np.isfinite(gaps).all():
        raise ValueError(f"gaps: got {len(gaps)} values, {int(np.isfinite(gaps).sum())} finite; pass finite values")
    gaps = np.asarray(gaps, dtype=np.float64)
    confidence = 1 / (1 + np.exp(-np.abs(gaps)))
    right = np.where(gaps == 0, 0.5, gaps > 0)
    edges = np.linspace(0.5, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    shares = np.where(counts > 0, counts, np.nan)
    confidences = np.bincount(place, confidence, bins) / shares
    accuracies = np.bincount(place, right, bins) / shares
    ece = float(np.nansum(counts * np.abs(accuracies - confidences)) / len(gaps))
    loss = float(np.logaddexp(0, -gaps).mean())
    return Calibration(float(right.mean()), loss, ece, edges, counts, confidences, accuracies)
