"""Decide when engines draft from earlier responses: over epochs, to repeat steps after a crash, in evaluations.

Role: `rlfuse.run` and `rlfuse eval` start engines with the configuration returned here. Drafts change
tokens only by rounding; they are left out, with a message, where engines can't verify them.
"""

from __future__ import annotations

from collections.abc import Callable

from rlfuse.config.custom_functions import with_values
from rlfuse.config.rollout import HISTORY
from rlfuse.config.schema import Config
from rlfuse.engines.rollout.engine_actor import engine_actor
from rlfuse.observe.run_log import RunLog
from rlfuse.step.drafts import Drafts


def run_drafts(config: Config, after: int, log: RunLog) -> Drafts:
    """Return the drafts of a run that continues after the step `after`."""
    if (store := log.responses) is None:
        return Drafts()
    over_epochs = config.rollout.draft == HISTORY
    return Drafts(
        store=store,
        are_wanted=over_epochs or store.last_step > after,
        repeated_until=store.last_step,
        epoch_limit_mb=config.rollout.draft_store_mb if over_epochs else 0,
        say=log.say,
    )


def run_engines(config: Config, after: int, log: RunLog) -> Config:
    """Return the configuration of a run's engines, which draft if `run_drafts` are wanted."""
    drafts = run_drafts(config, after, log)
    if not drafts.are_wanted:
        return config
    if config.trainer.deterministic:
        repeated = f"Steps {after + 1} to {drafts.repeated_until} are repeated without drafts"
        log.say(f"{repeated}: trainer.deterministic=true, and engines round differently with drafts")
        return config
    return with_drafts(config, log.say)


def with_drafts(config: Config, say: Callable[[str], None], trains: bool = True) -> Config:
    """Return the configuration with drafting engines; unchanged if they can't draft, which is printed.

    `trains`: the engines receive new weights.
    """
    drafting = with_values(config, {"rollout.draft": HISTORY})
    if not (reasons := engine_actor(config.rollout.name).unsupported_reasons(drafting, trains)):
        return drafting
    say(f"Earlier responses are not used as drafts. {'. '.join(reasons)}")
    return config
