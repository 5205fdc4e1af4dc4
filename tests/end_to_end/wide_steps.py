"""A job whose only engine spans both slots: its steps, a sample that moves, and the death of the engine's actor.

Run by driven_jobs.py for test_wide_engine.py.
"""

import asyncio
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import psutil
from rollouts import sample

from rlfuse.cluster import scratch
from rlfuse.config.compose import load
from rlfuse.protocols import Sampling
from rlfuse.run.build import run
from rlfuse.samples import Partial
from rlfuse.step.controller import Controller

SHARED = re.compile(r"/dev/shm/(?:psm|vllm)\S+")
WARM = Sampling(0.1, 1.0, -1, 300)
ATTEMPTS = 20


class Steps:
    """Steps of the job, run on its controller."""

    def __init__(self):
        self.found = {}

    async def drive(self, controller, step):
        await Controller.run(controller, step)
        self.engine = controller.engines.rollout[0]
        await self.engine.wake()
        self.found |= await self.move()
        pid = await self.engine.actor.__ray_call__.remote(lambda _: os.getpid())
        below = psutil.Process(pid).children(recursive=True)
        self.found["processes"] = len([each for each in below if each.memory_info().rss > 1 << 28])
        self.found["listening"] = [each.laddr.ip for process in below for each in process.net_connections("inet")]
        shared = [file for process in below for file in SHARED.findall(Path(f"/proc/{process.pid}/maps").read_text())]
        os.kill(pid, signal.SIGKILL)
        self.found["left"] = [each.pid for each in psutil.wait_procs(below, timeout=120)[1]]
        scratch.sweep(scratch.KV)  # as the next engine does
        self.found["shared"] = {file: Path(file).exists() for file in shared}

    async def move(self):
        """Evict samples with their KV caches and resume them from the files of both ranks."""
        samples = [sample(index, length=70) for index in range(16)]
        expected = await self.take(samples)
        self.found |= await self.repeat(samples, expected)
        samples.sort(key=lambda one: len(expected[one.id].token_ids))
        samples = samples[-3:]  # long enough to evict them in time
        for _ in range(ATTEMPTS):
            taking = asyncio.create_task(self.take(samples))
            while not taking.done() and not (await self.engine.load()).running:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)
            await self.engine.evict([one.id for one in samples], "kv")
            left = await taking
            if partials := {key: value for key, value in left.items() if isinstance(value, Partial)}:
                break  # otherwise they had finished on a busy machine
        while not await self.engine.actor.__ray_call__.remote(forget):
            await asyncio.sleep(0.02)
        await self.engine.drain()
        moved = left | await self.take([one for one in samples if one.id in partials], partials)
        spans = [span for span in await self.engine.drain() if span.kind == "generate"]
        return {
            "expected": {one.id: expected[one.id].token_ids.tolist() for one in samples},
            "moved": {key: value.token_ids.tolist() for key, value in moved.items()},
            "carried": [span.attributes["carried_tokens"] for span in spans],
            "cached": [span.attributes["cached_tokens"] for span in spans],
        }

    async def repeat(self, samples, expected):
        """Generate the same samples again, with their responses as drafts."""
        await self.engine.drain()
        found = await self.take([replace(one, drafts=(expected[one.id].token_ids,)) for one in samples])
        return {
            "identical": all(found[key].token_ids.tolist() == expected[key].token_ids.tolist() for key in expected),
            "accepted": sum(span.attributes.get("accepted", 0) for span in await self.engine.drain()),
            "tokens": sum(len(response.token_ids) for response in expected.values()),
        }

    async def take(self, samples, partials=None):
        return {key: value async for key, value in self.engine.generate(samples, WARM, partials)}


def forget(worker):
    """Reset the prefix cache, so that blocks have to come from the files; False while a sample holds blocks."""
    engine = worker._engine
    return asyncio.run_coroutine_threadsafe(engine.reset_prefix_cache(), engine.output_handler.get_loop()).result(60)


def perform(words):
    """Run the job; return what it recorded."""
    steps = Steps()
    steps.found["run"] = str(run(load(words), steps.drive))
    return steps.found
