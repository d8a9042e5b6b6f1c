"""Who comes next where several share: start-time fair queueing (Goyal, Vin and Cheng, 1996)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Turns(Generic[K, T]):
    """Queues, by key, that take turns: equal shares of the cost, whatever one turn costs.

    Over any time in which two queues wait, what they were charged differs by at most what one turn
    of each costs. Within a queue: first in, first out.
    """

    def __init__(self) -> None:
        self._queues: dict[K, deque[T]] = {}
        """None is empty."""
        self._tags: dict[K, float] = {}
        """What each was charged, and that it was not there to be charged with."""
        self._now = 0.0
        """Of the queue that came last, before it was charged."""

    def __contains__(self, key: K) -> bool:
        return key in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def items(self) -> list[T]:
        return [item for queue in self._queues.values() for item in queue]

    def first(self, key: K) -> T:
        return self._queues[key][0]

    def add(self, key: K, item: T) -> None:
        """To the end of its queue. Nothing is made good for the time before, nor charged twice."""
        if key not in self._queues:
            self._queues[key] = deque()
            self._tags[key] = max(self._tags.get(key, 0.0), self._now)
        self._queues[key].append(item)

    def next(self) -> K:
        """Which queue was charged least; of equals, the one that has waited longest."""
        key = min(self._queues, key=self._tags.__getitem__)
        self._now = self._tags[key]
        return key

    def charge(self, key: K, cost: float) -> None:
        self._tags[key] += cost

    def pop(self, key: K) -> None:
        """The first of this queue is done with."""
        self._queues[key].popleft()
        if not self._queues[key]:
            del self._queues[key]
        if not self._queues:
            self._tags.clear()
            self._now = 0.0
