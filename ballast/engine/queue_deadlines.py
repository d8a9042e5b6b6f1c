"""Keep the deadlines by which waiting requests must be admitted or fail, earliest first.

Part of `DeviceState`; the loop wakes at the next deadline.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from ballast.core.request import Request, RequestState


class QueueDeadlines:
    """Deadlines of requests that have not been admitted yet; others are skipped."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        """`requests`: all open requests, by id."""
        self._requests = requests
        self._deadlines: list[tuple[float, int, str]] = []
        """(seconds on the device's clock, sequence number, request), a heap."""

    def begin(self, request: Request, seconds: float) -> None:
        """Add a deadline: `request` must be admitted within `seconds` of its arrival."""
        order = request.order
        deadline = order.arrival + seconds
        heapq.heappush(self._deadlines, (deadline, order.sequence, request.id))

    @property
    def next(self) -> float | None:
        """The earliest deadline; None: there is none."""
        while self._deadlines:
            if self._first() is not None:
                return self._deadlines[0][0]
            heapq.heappop(self._deadlines)
        return None

    def over(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._first()
            heapq.heappop(self._deadlines)
            if request is not None:
                found.append(request)
        return found

    def _first(self) -> Request | None:
        """Return the request of the earliest deadline if it still waits for its first admission."""
        _, sequence, name = self._deadlines[0]
        request = self._requests.get(name)
        if request is None or request.order.sequence != sequence:
            return None
        queued = request.state in (RequestState.WAITING, RequestState.PAUSED)
        waits = queued and request.admitted_at is None
        return request if waits else None
