"""Detect in the server that a worker's process hangs, and have it killed.

Used by `LocalWorker`, which passes it every message and heartbeat of its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ballast.core.settings import ServerSettings
from ballast.transport.worker_messages.lifecycle_messages import HeartbeatMsg

FIRST_MESSAGE_SECONDS = 30.0
"""Additional time without a message that is allowed while a process starts."""


class LivenessWatch:
    """Kills a worker that sends nothing, or whose turn, job or load takes too long.

    The limits come from the server's settings (`silent_seconds`, `stuck_seconds`,
    `loading_seconds`). Runs on the event loop.
    """

    def __init__(self, kill: Callable[[str], None]) -> None:
        """`kill`: called with the reason."""
        self._kill = kill
        self._stuck_seconds = self._loading_seconds = float("inf")
        self._silence = -FIRST_MESSAGE_SECONDS
        """Seconds without a message."""
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._task is not None

    def start(self, limits: ServerSettings) -> None:
        """Watch from now on."""
        self._stuck_seconds = limits.stuck_seconds
        self._loading_seconds = limits.loading_seconds
        self._task = asyncio.create_task(self._watch_for_silence(limits.silent_seconds))

    def note_message(self) -> None:
        """Note that the worker has sent something."""
        self._silence = 0.0

    def check(self, heartbeat: HeartbeatMsg) -> None:
        """Kill the worker if its heartbeat shows that it hangs."""
        for what, seconds in (
            ("a turn of its loop", heartbeat.turn_seconds),
            ("a job", heartbeat.job_seconds),
        ):
            if seconds > self._stuck_seconds:
                self._kill(f"{what} took more than {self._stuck_seconds:g} s")
        if heartbeat.load_seconds > self._loading_seconds:
            self._kill(f"nothing more was loaded for {self._loading_seconds:g} s")

    def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    async def _watch_for_silence(self, silent_seconds: float) -> None:
        tick = min(1.0, silent_seconds / 4)
        while self._silence <= silent_seconds:
            await asyncio.sleep(tick)
            # Counted in ticks: time in which the server itself was held up does not count.
            self._silence += tick
        self._kill(f"it said nothing for {silent_seconds:g} s")
