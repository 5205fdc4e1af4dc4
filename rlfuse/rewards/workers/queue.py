"""Batch samples of concurrent `score` calls for a reward model, by size and by age.

    score() --put, waits while full--> [call, call, ...] --`size` of them, or the first is `age_s` old--> process
    score() <--its own future----------------------------- answers handed out ----------------------- process

Samples are taken in order, and every call taken is answered, also when the pool closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rlfuse.rewards.workers.reward_worker_handle import Call, closed

WAITING = 2
"""Batches that may wait before `put` does: the next is complete when the model is done with the present one."""


class Batches:
    """Used as the queue of a `RewardWorkerHandle`."""

    def __init__(self, size: int, age_s: float):
        self._size, self._age_s = size, age_s
        self._waiting: asyncio.Queue[tuple[float, Call]] = asyncio.Queue(WAITING * size)
        self._taken: list[Call] = []

    async def put(self, call: Call) -> None:
        await self._waiting.put((asyncio.get_running_loop().time(), call))

    async def get(self) -> Call:
        while not (calls := [call for call in self._taken if not call.answer.done()]):  # the others were given up
            self._taken = await self._take()
        self._taken = [call for call in calls if call.name != calls[0].name]
        return together([call for call in calls if call.name == calls[0].name])

    async def _take(self) -> list[Call]:
        since, first = await self._waiting.get()
        calls = [first]
        try:
            async with asyncio.timeout_at(since + self._age_s):
                while len(calls) < self._size:
                    calls.append((await self._waiting.get())[1])
        except TimeoutError:
            pass
        except BaseException:
            for call in calls:
                call.fail(closed())
            raise
        return calls

    def empty(self) -> bool:
        return not self._taken and self._waiting.empty()

    def get_nowait(self) -> Call:
        return self._taken.pop() if self._taken else self._waiting.get_nowait()[1]


def together(calls: Sequence[Call]) -> Call:
    """One call for all of them, of one label of a model; its answer becomes theirs; given up when all of them are."""
    items = [item for call in calls for item in call.items]
    positions = [position for call in calls for position in call.positions]
    whole = replace(calls[0], items=items, positions=positions)

    def hand_out(answer: asyncio.Future) -> None:
        if answer.cancelled():
            return
        error, start = answer.exception(), 0
        for call in calls:
            if error is not None:
                call.fail(error)
            elif not call.answer.done():
                call.answer.set_result(answer.result()[start : start + len(call.items)])
            start += len(call.items)

    def give_up(_: asyncio.Future) -> None:
        if all(call.answer.done() for call in calls):
            whole.answer.cancel()

    whole.answer.add_done_callback(hand_out)
    for call in calls:
        call.answer.add_done_callback(give_up)
    return whole
