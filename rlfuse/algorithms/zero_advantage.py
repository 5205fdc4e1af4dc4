"""Rows whose actor loss has only zero terms, so that the actor's passes over them can be skipped.

Role: pure. Under group estimators every row of a group with equal scores has the advantage 0. Its loss and gradient are
0 unless the configuration adds another term; `skip_blocker` names that term, `has_only_zero_terms` decides per row.
Invariant: a skipped row still counts in the divisor of the loss, and a row with a NaN or infinite input is not skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlfuse.config.custom_functions import loss_traits_of, traits_of
from rlfuse.config.policy_losses import DECORATOR
from rlfuse.config.schema import ActorConfig, Config

_FACTORS = ("old_log_probs", "is_weights")
"""Tensors in the factors of the advantages, if a row has them. A factor that is not finite makes the loss NaN."""


def skip_blocker(actor: ActorConfig) -> str:
    """Return the reason why no row is skipped; empty if rows without advantage are."""
    if actor.skip_zero_advantage == "false":
        return "actor.skip_zero_advantage=false"
    if actor.use_kl_loss:
        return "actor.use_kl_loss=true adds a KL term to every token (algorithm.use_kl_in_reward does not)"
    if actor.entropy_coeff:
        return f"actor.entropy_coeff={actor.entropy_coeff:g} adds an entropy bonus to every token"
    if not loss_traits_of(actor.loss_mode).zero_without_advantage:
        return (
            f"actor.loss_mode={actor.loss_mode} may not be 0 where the advantage is 0; if it is, declare "
            f"@{DECORATOR}(zero_without_advantage=True)"
        )
    return ""


def expects_skips(config: Config) -> bool:
    """Return whether rows can be skipped, and advantages are not normalised over the batch, so that some may be 0."""
    return not (skip_blocker(config.actor) or traits_of(config.algorithm.adv_estimator).whitens)


def skip_note(config: Config) -> str:
    """Return a line for users about skipped responses; empty if skipping is off, or if advantages are rarely 0."""
    whitens = traits_of(config.algorithm.adv_estimator).whitens
    if config.trainer.is_offline or whitens or config.actor.skip_zero_advantage == "false":
        return ""
    if why := skip_blocker(config.actor):
        return f"responses without advantage are not skipped in the actor's passes: {why}"
    return "responses without advantage are skipped in the actor's passes (actor.skip_zero_advantage=auto)"


def has_only_zero_terms(actor: ActorConfig, tensors: Mapping[str, np.ndarray], mask: np.ndarray) -> bool:
    """Return whether the actor's loss of a row and its gradient are 0.

    `mask` bool [T]: trainable tokens. `tensors`: float32 [T] each, `advantages` and those of `old_log_probs`,
    `is_weights`, `loss_mask` and `selected` that the row has. Valid only if `skip_blocker` is empty. kl_cov adds a KL
    term to `selected` tokens.
    """
    if "loss_mask" in tensors:
        mask = mask & (tensors["loss_mask"] > 0)
    terms = ["advantages"]
    terms += ["selected"] if actor.loss_mode == "kl_cov" and actor.ppo_kl_coef else []
    if any(tensors[name][mask].any() for name in terms):  # NaN counts as nonzero
        return False
    return all(np.isfinite(tensors[name][mask]).all() for name in _FACTORS if name in tensors)
