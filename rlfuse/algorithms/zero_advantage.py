"""Rows whose actor loss has only zero terms, so that the actor's passes over them can be skipped.

Role: pure. Under group estimators every row of a group with equal scores has the advantage 0. Its loss and gradient are
0 unless the configuration adds another term, which `skip_blocker` names. So are those of a row without tokens in the
loss (actor.mask_truncated_completions) and of one that rollout correction rejects. `has_only_zero_terms` decides.
Invariant: a skipped row still counts in the divisor of the loss, and a row with a NaN or infinite input is not skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlfuse.config.custom_functions import loss_traits_of, traits_of
from rlfuse.config.policy_losses import DECORATOR
from rlfuse.config.schema import ActorConfig, Config

_READ = ("advantages", "old_log_probs", "is_weights", "selected")
"""Tensors that the policy loss reads, if a row has them. One that is not finite makes the loss NaN."""
SKIPPED_SHARE = "actor/skipped_zero_advantage"
"""Metric: the share of a step's samples whose actor passes were skipped."""


def skip_blocker(actor: ActorConfig) -> str:
    """Return the reason why rows without advantage are not skipped; empty if they are."""
    if why := _never_skips(actor):
        return why
    if actor.use_kl_loss:
        return "actor.use_kl_loss=true adds a KL term to every token"
    if actor.entropy_coeff:
        return f"actor.entropy_coeff={actor.entropy_coeff:g} adds an entropy bonus to every token"
    return ""


def _never_skips(actor: ActorConfig) -> str:
    """Return the reason why no row is skipped at all; empty if some may be."""
    if actor.skip_zero_advantage == "false":
        return "actor.skip_zero_advantage=false"
    if not loss_traits_of(actor.loss_mode).zero_without_advantage:
        return (
            f"actor.loss_mode={actor.loss_mode} may not be 0 where the advantage is 0; if it is, declare "
            f"@{DECORATOR}(zero_without_advantage=True)"
        )
    return ""


def may_skip(actor: ActorConfig) -> bool:
    """Return whether the loss of some rows may have only zero terms."""
    return not (_never_skips(actor) if actor.mask_truncated_completions else skip_blocker(actor))


def expects_skips(config: Config) -> bool:
    """Return whether rows without advantage are skipped, and some are likely to have none."""
    return not (skip_blocker(config.actor) or _is_rarely_zero(config) or _kl_reason(config))


def skip_note(config: Config) -> str:
    """Return a line for users about skipped responses; empty if skipping is off, or if advantages are rarely 0."""
    if config.trainer.is_offline or _is_rarely_zero(config) or config.actor.skip_zero_advantage == "false":
        return ""
    if why := skip_blocker(config.actor) or _kl_reason(config):
        return f"responses without advantage are not skipped in the actor's passes: {why}"
    return "responses without advantage are skipped in the actor's passes (actor.skip_zero_advantage=auto)"


def _is_rarely_zero(config: Config) -> bool:
    """Return whether advantages are normalised over the batch or differences to the reference, so hardly any is 0."""
    traits = traits_of(config.algorithm.adv_estimator)
    return bool(traits.whitens) or traits.needs_reference


def _kl_reason(config: Config) -> str:
    """Return the reason why every response has an advantage after the first update; empty if there is none."""
    algorithm = config.algorithm
    if not (algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef):
        return ""
    return "algorithm.use_kl_in_reward=true gives every response an advantage"


def has_only_zero_terms(actor: ActorConfig, tensors: Mapping[str, np.ndarray], mask: np.ndarray) -> bool:
    """Return whether the actor's loss of a row and its gradient are 0, and its passes may be skipped.

    `mask` bool [T]: tokens in the loss; without any, the row has no term at all. `tensors`: float32 [T] each,
    `advantages` and those of `old_log_probs`, `is_weights` and `selected` that the row has. Importance weights multiply
    the whole policy loss, including the KL term that kl_cov adds to `selected` tokens.
    """
    if _never_skips(actor):
        return False
    if not mask.any():
        return True
    found = {name: tensors[name][mask] for name in _READ if name in tensors}
    if skip_blocker(actor) or not all(np.isfinite(each).all() for each in found.values()):
        return False
    if "is_weights" in found and not found["is_weights"].any():
        return True
    penalised = actor.loss_mode == "kl_cov" and actor.ppo_kl_coef and found["selected"].any()
    return not (found["advantages"].any() or penalised)
