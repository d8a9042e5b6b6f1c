"""Run work that would block the event loop on a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_LONG = ThreadPoolExecutor(2, "long")
"""Few: threads that need the interpreter lock make the loop wait for it."""
_HUGE = ThreadPoolExecutor(1, "huge")
"""For what takes seconds, so that it holds up only its like. One: a text takes about 180 times its
length in memory while it is tokenized."""


async def off_loop(long: bool, work: Callable[[], T], *, huge: bool = False) -> T:
    """The result of `work`, done in another thread if it takes `long`, or even longer (`huge`)."""
    if not long:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_HUGE if huge else _LONG, work)
