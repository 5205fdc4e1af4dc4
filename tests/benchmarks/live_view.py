"""Write the picture of a live run: the terminal's view of a quickstart while some samples generate and others score.

    python tests/benchmarks/live_view.py [--out jobs/live.svg] [--step 8] [key=value ...]

Needs the output of `rlfuse prepare quickstart`. Runs the job as `rlfuse train experiment=quickstart` does, samples the
view every 20 ms, and keeps the first view of the step in which a slot generates while another scores or trains (else
the last one).
"""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path

from rich.console import Console

from rlfuse.config.compose import load
from rlfuse.observe.live import View, render
from rlfuse.run.build import run
from rlfuse.step.controller import Controller


class Looking:
    """Drives the job and samples its live view during step `step`."""

    def __init__(self, step: int):
        self.step, self.seen = step, None

    async def drive(self, controller: Controller, start: int) -> None:
        """Run the job with the live view of an interactive terminal."""
        looking = asyncio.create_task(self._look(controller.metrics.loggers.terminal))
        await controller.run(start)
        looking.cancel()

    async def _look(self, terminal) -> None:
        while True:
            view = terminal.view()
            if view.step == self.step - 1 and view.stages:
                self.seen = view
                if telling(view):
                    return
            await asyncio.sleep(0.02)


def telling(view: View) -> bool:
    """Return whether one slot generates while another scores or trains."""
    doing = {what for what, _ in view.slots}
    return "generate" in doing and bool(doing - {"generate", "idle", "switch"})


def main() -> None:
    """Run the job and write the picture."""
    parser = argparse.ArgumentParser(description="The terminal's view of a live run, as SVG.")
    parser.add_argument("--out", type=Path, default=Path("jobs/live.svg"))
    parser.add_argument("--step", type=int, default=8)
    arguments, overrides = parser.parse_known_args()
    looking = Looking(arguments.step)
    run(load(["experiment=quickstart", "trainer.resume_mode=disable", *overrides]), looking.drive)
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(looking.seen))
    console.save_svg(str(arguments.out), title="rlfuse train experiment=quickstart")
    print(f"picture    {arguments.out}")


if __name__ == "__main__":
    main()
