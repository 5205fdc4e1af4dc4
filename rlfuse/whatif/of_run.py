"""Examine a run folder: what its last steps lost to uneven workers."""

from __future__ import annotations

from dataclasses import dataclass

from rlfuse.events import Span
from rlfuse.health.alarms import read_alarms
from rlfuse.health.detection import Alarm
from rlfuse.run_folder.code import policy_code, refuse_code
from rlfuse.run_folder.reader import RunFolder
from rlfuse.simulate.recorded import config_of
from rlfuse.whatif.questions import Simulated, ranks_of, simulated
from rlfuse.whatif.run_operations import operations, recorded_steps
from rlfuse.whatif.run_slowdown import Analysis, RunSlowdown

STEPS = 20  # of a run, the last


@dataclass(frozen=True, slots=True)
class Examined:
    """A run's last undisturbed steps, and what was found."""

    steps: list[tuple[Span, list[Span]]]
    analysis: Analysis
    simulated: Simulated | None
    found: RunSlowdown
    alarms: list[Alarm]  # what the run told of slow and faulty workers itself, and when that began


def examine(run: RunFolder, steps: int = STEPS, run_code: bool = False) -> Examined:
    """RunError or WorkloadError where the folder doesn't tell enough. Steps on other ranks than the last are left out:
    a run may have been resumed on more devices, or fewer."""
    config, recorded = config_of(file := run.path / "config.yaml"), recorded_steps(run, steps)
    refuse_code(file, policy_code(config.fusion.policy), run_code)
    ranks = ranks_of(recorded[-1][1])
    recorded = [step for step in recorded if ranks_of(step[1]) == ranks]
    spans = [span for _, inside in recorded for span in inside]
    analysis = Analysis(operations(recorded, run.width, config.actor.zero_stage), spans)
    clock = simulated(config, recorded)
    found = analysis.found() if clock is None else analysis.found(clock.decided_anew)
    return Examined(recorded, analysis, clock, found, read_alarms(run.path))
