"""Waits for device work in `asyncio`."""

from __future__ import annotations

import asyncio
import os

from ._highwater import Done


async def until_over(done: Done) -> None:
    """Returns once the wait is over. Raises the error of failed work."""
    if not done.is_over:
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        # A loop has one reader for each descriptor, so each task needs its own.
        descriptor = os.dup(done.fileno())
        try:
            loop.add_reader(descriptor, wake)
            try:
                await over
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)
    done.result()
