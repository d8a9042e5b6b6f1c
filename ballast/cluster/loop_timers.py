"""Timers of the running event loop, for the state machines of `ballast.control`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class LoopTimers:
    """Implements `control.timers.Timers`; calls need a running event loop."""

    def now(self) -> float:
        return time.monotonic()  # the clock of event loops

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)
