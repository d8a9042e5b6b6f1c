"""Detect in the server that a worker's process hangs, and have it killed.

Used by `SupervisedWorker`, which passes it every message and heartbeat of its process. A worker
that cannot send may be busy: code that keeps the interpreter lock (an import, a compilation), or a
machine with more work than cores. So processor time that grows, which the kernel counts, is a sign
of life as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ballast.core.settings import ServerSettings
from ballast.transport.worker_messages.lifecycle_messages import HeartbeatMsg

Activity = tuple[int, int]
"""Processor time in ticks of the kernel, and major page faults, since a process started."""


def process_activity(pid: int) -> Activity | None:
    """Read what all threads of a process have used so far; None if it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # Behind the name, which may have spaces and parentheses: the third field and those after.
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]), int(fields[9])
    except (OSError, ValueError, IndexError):
        return None


class LivenessWatch:
    """Kills a worker that sends nothing, or whose turn, job or load takes too long.

    The limits come from the server's settings. A worker that sends nothing and uses no processor
    time is killed after `silent_seconds` (`starting_seconds` while it starts); one that sends
    nothing but computes, after `stuck_seconds` (`loading_seconds`). Runs on the event loop.
    """

    def __init__(
        self, kill: Callable[[str], None], activity: Callable[[], Activity | None]
    ) -> None:
        """`kill`: called with the reason. `activity`: of the worker's process."""
        self._kill = kill
        self._activity = activity
        self.limits = ServerSettings()
        """Holds the limits; set by `start`."""
        self._serves = False
        self._silence = 0.0
        """Seconds without a message."""
        self._idle = 0.0
        """Seconds without a message or a change of `_last_activity`."""
        self._last_activity: Activity | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._task is not None

    def start(self, limits: ServerSettings) -> None:
        """Watch from now on a worker that starts."""
        self.limits = limits
        tick = min(1.0, limits.silent_seconds / 4, limits.starting_seconds / 4)
        self._task = asyncio.create_task(self._watch(tick))

    def note_ready(self) -> None:
        """Note that the worker serves."""
        self._serves = True

    def note_message(self) -> None:
        """Note that the worker has sent something."""
        self._silence = self._idle = 0.0

    def check(self, heartbeat: HeartbeatMsg) -> None:
        """Kill the worker if its heartbeat shows that it hangs."""
        limits = self.limits
        for what, seconds in (
            ("a turn of its loop", heartbeat.turn_seconds),
            ("a job", heartbeat.job_seconds),
        ):
            if seconds > limits.stuck_seconds:
                self._kill(f"{what} took more than {limits.stuck_seconds:g} s")
        if heartbeat.load_seconds > limits.loading_seconds:
            self._kill(f"nothing more was loaded for {limits.loading_seconds:g} s")

    def tick(self, seconds: float) -> str | None:
        """Count `seconds` in which the server did not hear of the worker, unless it has sent or
        computed something since; returns why it is to be killed, None if it is not."""
        activity = self._activity()
        if activity is not None and activity != self._last_activity:
            self._idle = 0.0
        self._last_activity = activity
        self._silence += seconds
        self._idle += seconds
        limits = self.limits
        idle, busy = (
            (limits.silent_seconds, limits.stuck_seconds)
            if self._serves
            else (limits.starting_seconds, limits.loading_seconds)
        )
        if self._idle > idle:
            return f"it said nothing for {idle:g} s, and used no processor time"
        if self._silence > max(idle, busy):
            return f"it said nothing for {max(idle, busy):g} s, though it used processor time"
        return None

    def stop(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, tick: float) -> None:
        why = None
        while why is None:
            await asyncio.sleep(tick)
            # Counted in ticks: time in which the server itself was held up does not count.
            why = self.tick(tick)
        self._kill(why)
