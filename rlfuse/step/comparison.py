"""Before anything is learned: do the engines compute the model that is trained?

Role: called by the controller once the first weights of a run are out. Waits for a few tokens of every engine and one
pass of the trainer, bounded by their own limits; for another push where all engines were lost meanwhile.
"""

from __future__ import annotations

from rlfuse.engines.agreement import TOKENS, compare
from rlfuse.protocols import Sampling
from rlfuse.step.groups import GroupSource
from rlfuse.step.protocols import Metrics


async def compare_first_weights(groups: GroupSource, metrics: Metrics, step: int) -> None:
    """Both score the same tokens; EngineError where they don't agree, or metrics take note. Engines have the devices.

    `step`: the version of the weights.
    """
    config, engines = groups.config, groups.engines
    drawn = Sampling(config.rollout.temperature, 1.0, -1, min(TOKENS, config.data.max_response_length))
    with groups.recorder.span("testing", step=step, cause="weights"):
        while (group := await groups.comparison(step)) is not None:
            if (agreement := await compare(engines, group, drawn)) is not None:
                metrics.log_agreement(step, agreement)
                break
            await engines.weights.push(version=step)  # all engines were lost: others take their places
    await engines.clips.release("testing")
