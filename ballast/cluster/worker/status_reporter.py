"""Send the device's state and heartbeats to the server, from the worker's main thread.

Used by `Worker`. An unchanged report is sent once a second, a changed one ten times a second at
most; heartbeats also while the device loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ballast.cluster.worker.device_thread import DeviceThread
from ballast.core.clock import Clock
from ballast.core.report import DeviceReport
from ballast.transport.worker_messages.codec import ToServer
from ballast.transport.worker_messages.lifecycle_messages import HeartbeatMsg, StatusMsg

REPORT_SECONDS = 0.1
"""Shortest time between two reports."""
STALE_SECONDS = 1.0
"""Interval at which an unchanged report is repeated, so that an older one shows a dead process."""
HEARTBEAT_SECONDS = 0.5


class StatusReporter:
    """Sends reports and heartbeats when they are due; remembers the last ones."""

    def __init__(
        self, send: Callable[[ToServer], None], device: DeviceThread, clock: Clock
    ) -> None:
        self._send, self._device, self._clock = send, device, clock
        self._reported: DeviceReport | None = None
        self._reported_at = float("-inf")
        self._beat_at = float("-inf")

    def report(self, *, at_once: bool = False) -> None:
        """Send the device's report and its new decisions, if they have changed and are due.

        `at_once`: send them even within REPORT_SECONDS of the last report.
        """
        now = self._clock.now()
        with self._device.use() as device:
            soon = now - self._reported_at < REPORT_SECONDS
            if device is None or (soon and not at_once):
                return
            report, decisions = device.snapshot(), device.decisions()
        same = self._reported is not None and report == replace(self._reported, now=report.now)
        if same and not decisions and now - self._reported_at < STALE_SECONDS:
            return
        self._reported, self._reported_at = report, now
        self._send(StatusMsg(report, decisions))

    def beat(self) -> None:
        """Send a heartbeat, if one is due."""
        now = self._clock.now()
        if now - self._beat_at < HEARTBEAT_SECONDS:
            return
        self._beat_at = now
        with self._device.use() as device:
            if device is not None:
                heartbeat = HeartbeatMsg(*device.busy())
            else:
                heartbeat = HeartbeatMsg(load_seconds=self._device.load_seconds(now))
        self._send(heartbeat)
