"""SIGTERM to a process that runs a job: what becomes of its work, and how that is told."""

import asyncio
import os
import signal

import pytest

from rlfuse.engines.protocols import EngineError
from rlfuse.preemption import Preempted, Preemption
from rlfuse.train import reported


async def told(work, stepping=True, grace_s=60.0):
    """`work` is told of after it began; what was said to the person."""
    said = []
    preemption = Preemption(grace_s, said.append)
    preemption.stepping = stepping

    async def begin():
        os.kill(os.getpid(), signal.SIGTERM)
        await work(preemption)

    before = signal.getsignal(signal.SIGTERM)
    try:
        await preemption.heed(begin())
    finally:
        assert signal.getsignal(signal.SIGTERM) is before
    return said


async def forever(_):
    await asyncio.sleep(60)


async def test_a_step_that_ends_in_time_leaves_by_itself():
    async def steps(preemption):
        while not preemption.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        raise Preempted("left after step 3")

    with pytest.raises(Preempted, match="left after step 3"):
        await told(steps)


async def test_work_that_ends_well_nevertheless_has_ended_well():
    said = await told(lambda _: asyncio.sleep(0.01))
    assert len(said) == 1 and "trainer.preemption_grace_s=60" in said[0]


@pytest.mark.parametrize("stepping, words", [(True, "lost"), (False, "nothing to save")])
async def test_what_does_not_end_in_time_is_cut_off(stepping, words):
    with pytest.raises(Preempted, match=words):
        await told(forever, stepping, grace_s=0.01)


async def test_workers_that_the_signal_ended_too_are_no_failure_of_the_run():
    async def loses_a_worker(_):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            raise EngineError("trainer/1 died")

    with pytest.raises(Preempted, match="before the step under way was saved: trainer/1 died"):
        await told(loses_a_worker)


def test_the_exit_status_says_try_again(capsys):
    def leave():
        raise Preempted("SIGTERM: the run left after step 3, which is saved.")

    assert reported(leave) == 75
    assert capsys.readouterr().err == "SIGTERM: the run left after step 3, which is saved.\n"
