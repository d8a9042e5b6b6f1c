"""Run work that would block the event loop on a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_LONG = ThreadPoolExecutor(2, "long")
"""Threads for long work; few, since threads that need the interpreter lock make the loop wait for
it."""
_HUGE = ThreadPoolExecutor(1, "huge")
"""Thread for work of seconds, which delays only work of its kind. One thread, since tokenizing
takes about 180 times a text's length in memory."""


async def off_loop(long: bool, work: Callable[[], T], *, huge: bool = False) -> T:
    """Return the result of `work`, run on another thread if it is `long`, or even longer
    (`huge`)."""
    if not long:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_HUGE if huge else _LONG, work)
