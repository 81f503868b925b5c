"""Long work in a thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONG_TEXT = 16384  # characters; tokenizing more takes longer than a stream should wait


async def off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Run `work` here if it is short, otherwise in a thread, so that it does not block streams."""
    if num_chars < LONG_TEXT:
        return work()
    return await asyncio.to_thread(work)
