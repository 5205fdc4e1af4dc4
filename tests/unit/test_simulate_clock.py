"""Virtual time: sleeps take no time, and deadlocks are errors."""

import asyncio
import time

import pytest

from rlfuse.simulate.clock import Deadlock, run_virtual


def test_time_jumps_to_the_next_timer_and_keeps_their_order():
    async def main():
        loop, seen = asyncio.get_running_loop(), []

        async def after(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, loop.time()))

        await asyncio.gather(after(86_400.0), after(0.5), after(3600.0))
        return seen

    began = time.monotonic()
    seen = run_virtual(main())
    assert [seconds for seconds, _ in seen] == [0.5, 3600.0, 86_400.0]
    assert [now for _, now in seen] == pytest.approx([0.5, 3600.0, 86_400.0], abs=1e-6)
    assert time.monotonic() - began < 60


def test_a_deadlock_is_an_error_with_its_time():
    async def main():
        await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"deadlock at 2\.0+ virtual seconds"):
        run_virtual(main())


async def test_virtual_time_works_inside_a_running_loop():
    async def main():
        await asyncio.sleep(10.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10.0)


def test_time_advances_at_coarse_float_resolution():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1e9)
        await asyncio.sleep(1e-12)
        return loop.time()

    assert run_virtual(main()) == pytest.approx(1e9)
