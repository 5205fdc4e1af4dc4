"""`rlfuse train` with trainer ranks whose model differs from the engines'. Run by driven_jobs.py for test_job.py."""

import asyncio

import rlfuse_command

from rlfuse.run import build as running


def perform(words):
    """Run `rlfuse` as `rlfuse_command` does; the weights are unchanged."""
    build_controller = running.build_controller

    async def build_with_other_model(*given, **named):
        controller = await build_controller(*given, **named)
        await asyncio.gather(*(rank.__ray_call__.remote(change) for rank in controller.engines.trainer.ranks))
        return controller

    running.build_controller = build_with_other_model
    return rlfuse_command.perform(words)


def change(rank):
    for module in rank.engines["actor"].module.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
