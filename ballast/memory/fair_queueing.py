"""Choose which of several queues is served next: start-time fair queueing (Goyal et al., 1996).

Used by the links, to share bandwidth between directions and between streams of transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class StartTimeFairQueues(Generic[K, T]):
    """Queues, by key, that are served in equal shares of cost, whatever the cost of one service.

    Over any time in which two queues wait, their charges differ by at most the cost of one service
    of each. Within a queue: first in, first out.
    """

    def __init__(self) -> None:
        self._queues: dict[K, deque[T]] = {}
        """No queue is empty."""
        self._tags: dict[K, float] = {}
        """Start tags: charges of each queue, and those that it missed while it was empty."""
        self._now = 0.0
        """Virtual time: the start tag of the queue that was served last."""

    def __contains__(self, key: K) -> bool:
        return key in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def items(self) -> list[T]:
        return [item for queue in self._queues.values() for item in queue]

    def first(self, key: K) -> T:
        return self._queues[key][0]

    def add(self, key: K, item: T) -> None:
        """Append to the queue `key`. A queue that was empty is not compensated for that time."""
        if key not in self._queues:
            self._queues[key] = deque()
            self._tags[key] = max(self._tags.get(key, 0.0), self._now)
        self._queues[key].append(item)

    def next(self) -> K:
        """Key of the queue that was charged least; of equals, the one that has waited longest."""
        key = min(self._queues, key=self._tags.__getitem__)
        self._now = self._tags[key]
        return key

    def charge(self, key: K, cost: float) -> None:
        self._tags[key] += cost

    def pop(self, key: K) -> None:
        """Remove the first item of this queue."""
        self.remove(key, self._queues[key][0])

    def remove(self, key: K, item: T) -> None:
        """Remove an item of this queue."""
        self._queues[key].remove(item)
        if not self._queues[key]:
            del self._queues[key]
        if not self._queues:
            self._tags.clear()
            self._now = 0.0
