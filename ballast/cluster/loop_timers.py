"""Timers of the running event loop, for the state machines of `ballast.control`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopTimers:
    """Implements `control.timers.Timers`; the event loop must be running."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)
