"""Who looks after the workers of a job: agents on its nodes, and a monitor that is asked once a step.

Role: `rlfuse.run.build` and `rlfuse.run.reward_model` call `looked_after` once the slots are known. Waits for nothing.
"""

from __future__ import annotations

from rlfuse.cluster.placement import Slots
from rlfuse.config.schema import Config
from rlfuse.health.agent import agents
from rlfuse.health.monitor import Monitor
from rlfuse.observe.run_log import RunLog
from rlfuse.step.protocols import NoHealth


def looked_after(config: Config, slots: Slots, log: RunLog) -> Monitor | NoHealth:
    """To be closed; nobody, where alerts.slow_worker_s is null."""
    continuity = config.alerts.slow_worker_s
    if continuity is None:
        return NoHealth()
    width = config.rollout.tensor_model_parallel_size
    return Monitor(log.folder, agents(slots), continuity, width, log.loggers.alert, log.say)
