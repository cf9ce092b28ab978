"""Waits of `asyncio` for device work."""

from __future__ import annotations

import asyncio
import select

import numpy as np
import pytest

import highwater


def test_a_task_waits_for_a_stream_and_an_event(stream: highwater.Stream) -> None:
    async def work() -> None:
        for value in range(50):
            buffer = stream.allocate(1000, "float32")
            stream.fill(buffer, value)
            event = stream.record()
            await event
            assert event.is_complete
            await stream.done()
            assert np.array_equal(stream.download(buffer), np.full(1000, value))
        # Work that is done already.
        await event
        await stream.done()

    asyncio.run(work())


def test_other_tasks_run_meanwhile(slow: highwater.Runtime) -> None:
    stream = slow.device(0).create_stream()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def work() -> None:
        counting = asyncio.create_task(count())
        buffer = stream.upload([1.0], "float32")
        stream.fill(buffer, 2.0)
        done = stream.done()
        assert not done.is_over
        with pytest.raises(highwater.InvalidState):
            done.result()
        # Several tasks may await one wait.
        await asyncio.gather(*(wait(done) for _ in range(10)))
        assert done.is_over and turns > 1
        counting.cancel()

    async def wait(done: highwater.Done) -> None:
        await done

    asyncio.run(work())


def test_a_cancelled_wait_ends_and_the_work_goes_on(slow: highwater.Runtime) -> None:
    stream = slow.device(0).create_stream()
    buffer = stream.upload([1.0], "float32")

    async def work() -> None:
        stream.fill(buffer, 2.0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(stream.done()), 0.001)
        await stream.done()

    async def wait(done: highwater.Done) -> None:
        await done

    asyncio.run(work())
    assert stream.download(buffer) == [2.0]


def test_the_descriptor_becomes_readable(stream: highwater.Stream) -> None:
    stream.fill(stream.allocate(1000, "float32"), 1.0)
    done = stream.record().done()
    assert select.select([done], [], [], 20)[0] == [done]
    assert done.is_over
    done.result()
