"""Trainer ranks that hang in a call are detected, reported with their last activity, and killed; slow ones are not."""

import asyncio
import os
import re
import signal
import sys
import time

import psutil
import pytest
from ray import cloudpickle
from trainer_probe import lengths, make_rows, scores_of, settings

from rlfuse.engines.trainer.trainer_group import TrainerGroup
from rlfuse.errors import WorkerLost

HEARTBEAT_S, LIMIT_S = 3.0, 120.0


def compute_before_a_step(rank, seconds):
    """Make the next optimizer step of this rank slow, in Python code that holds the GIL most of the time."""
    step = rank.engines["actor"].engine.step

    def slow():
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(500_000))
        rank.engines["actor"].engine.step = step
        step()

    rank.engines["actor"].engine.step = slow


def stop_in_a_step(rank):
    """Make the next optimizer step of this rank stop its process with SIGSTOP."""
    rank.engines["actor"].engine.step = lambda: os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_a_pass(rank):
    """Make the next forward pass of this rank hang, in code outside rlfuse."""

    def asleep_for_ever(*_):
        time.sleep(10_000)

    rank.engines["actor"].module.register_forward_pre_hook(asleep_for_ever)


async def arm(rank, how, *arguments):
    """Install a fault in a rank; return its process."""
    await rank.__ray_call__.remote(how, *arguments)
    return psutil.Process(await rank.__ray_call__.remote(lambda _: os.getpid()))


async def lost(call, process):
    """Return the error message and the seconds until it is raised; wait for the end of the process."""
    began = time.monotonic()
    with pytest.raises(WorkerLost) as error:
        await call
    seconds = time.monotonic() - began
    await asyncio.to_thread(process.wait, LIMIT_S)
    return str(error.value), seconds


async def test_a_hung_rank_is_detected_but_not_one_that_computes_or_waits(tiny_model, slots):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = settings(str(tiny_model))
    config.cluster.heartbeat_s = HEARTBEAT_S
    group, _ = await TrainerGroup.start(config, slots)
    rows = make_rows()

    await arm(group.ranks[0], compute_before_a_step, 3 * HEARTBEAT_S)
    await group.accumulate(("actor",), rows)
    began = time.monotonic()
    await group.step("actor", lengths(rows))
    assert time.monotonic() - began > 3 * HEARTBEAT_S

    process = await arm(group.ranks[0], stop_in_a_step)
    await group.accumulate(("actor",), rows)
    message, seconds = await lost(group.step("actor", lengths(rows)), process)
    assert message.startswith("trainer/0 hangs in the call to update the actor: it has not answered for "), message
    assert "Ranks waiting for it: trainer/1." in message, message
    assert HEARTBEAT_S <= seconds < LIMIT_S < config.cluster.timeout_s

    process = await arm(group.ranks[1], sleep_in_a_pass)
    message, seconds = await lost(scores_of(group, "actor", rows, slot=1), process)
    assert message.startswith(
        "trainer/1 hangs in the call to compute log-probs of the actor: it has made no progress for "
    ), message
    assert "last activity: began old_log_prob at " in message
    assert re.search(r'Its stack, innermost call first:\n  File ".*test_hung_ranks\.py", line \d+ in asleep_f', message)
    assert HEARTBEAT_S <= seconds < LIMIT_S < config.cluster.timeout_s
