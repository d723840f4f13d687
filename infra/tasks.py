"""Ends asyncio tasks, also those that lose a cancellation."""

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 1.0
"""Longer than a connection takes to close in good order."""


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and return once all have ended; what they return or raise is dropped.

    Who has not ended is cancelled again every `AGAIN_S`: a cancellation that comes just as an `asyncio.wait_for` ends
    is lost before Python 3.12, and nats-py swallows some. A loop that tries on and on would then never end.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        ended, pending = await asyncio.wait(pending, timeout=AGAIN_S)
        await asyncio.gather(*ended, return_exceptions=True)
