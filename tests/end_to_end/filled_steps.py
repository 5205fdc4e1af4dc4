"""A critic-free job on pipelines, from the same weights: once with passes before training, once in its bubbles.

Run by driven_jobs.py for test_filled_bubbles.py.
"""

from fused_steps import Steps

from rlfuse.config.compose import load
from rlfuse.fusion.schedules.planning import Planner
from rlfuse.run.build import run

STEPS = 2


class Filled(Steps):
    """Steps of the job, run on its controller."""

    async def drive(self, controller, _):
        """Run the same steps with `fusion.training` serial and fused."""
        self.controller, trainer = controller, controller.engines.trainer
        for case in ("serial", "fused"):
            await trainer.setup(tuple(trainer.layout.values()))  # initial weights and optimizers
            controller.groups.prompts.taken = 0
            controller.config.fusion.training = case
            trainer.planner = Planner(2, case)
            await controller.update_weights(0)
            self.found[case] = [await self.step(number) for number in range(1, STEPS + 1)]

    def described(self, spans):
        """Return the micro-batches scored within schedules, and the number of calls for separate passes."""
        kinds = ("old_log_prob", "ref")
        return {
            "scored": [span.attributes["scored"] for span in spans if span.kind == "schedule"],
            "alone": {kind: sum(span.kind == kind and span.where == "driver" for span in spans) for kind in kinds},
        }


def perform(words):
    """Return case -> its steps."""
    config = load(words)
    steps = Filled(config.run_folder)
    run(config, steps.drive)
    return steps.found
