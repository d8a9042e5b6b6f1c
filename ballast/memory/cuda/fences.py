"""Fences made of events: what was given to some streams so far has ended."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.memory.cuda.calls import Driver


class EventFence:
    """Implements `Fence`. Its events go back to be used again once they were found done."""

    __slots__ = ("_events", "_pool")

    def __init__(self, pool: EventPool, events: list[int]) -> None:
        self._pool, self._events = pool, events

    def done(self) -> bool:
        """Raises DeviceError where that work has failed."""
        while self._events:
            if not self._pool.driver.is_done(self._events[-1]):
                return False
            self._pool.release(self._events.pop())
        return True


class EventPool:
    """CUDA events of one device, used again and again, since making one takes a driver call."""

    def __init__(self, driver: Driver, timed: bool = False) -> None:
        """`timed`: they know when they were reached, which costs the streams a little."""
        self.driver, self._timed = driver, timed
        self._made: list[int] = []
        self._unused: list[int] = []

    def after(self, streams: Sequence[int]) -> EventFence:
        """Done when all work that these streams have now has ended. A context is current."""
        recorded: list[int] = []
        for stream in streams:
            event = self.acquire()
            # If this fails, the events recorded so far are in flight, and are not used again.
            self.driver.record(event, stream)
            recorded.append(event)
        return EventFence(self, recorded)

    def acquire(self) -> int:
        """One that nothing waits for, to be recorded."""
        if self._unused:
            return self._unused.pop()
        event = self.driver.new_event(self._timed)
        self._made.append(event)
        return event

    def release(self, event: int) -> None:
        """It was found done, or was never recorded."""
        self._unused.append(event)

    def close(self) -> None:
        """Fences made here may not be asked any more."""
        self._unused.clear()
        while self._made:
            self.driver.destroy_event(self._made.pop())


class StreamStalls:
    """Of streams that wait for events of others: how long they stood still, by their own clock."""

    def __init__(self, events: EventPool) -> None:
        """`events`: timed."""
        self._events = events
        self._waits: list[tuple[int, int]] = []
        """Since it was last asked: the events before and after each."""

    def wait_for(self, stream: int, event: int) -> None:
        """What comes next in the stream begins after it. Returns at once."""
        driver, before, after = self._events.driver, self._events.acquire(), self._events.acquire()
        driver.record(before, stream)
        driver.wait_for(stream, event)
        driver.record(after, stream)
        self._waits.append((before, after))

    def seconds(self) -> float:
        """All together since this was last asked; the streams have come that far."""
        waits, self._waits = self._waits, []
        seconds = 0.0
        for before, after in waits:
            seconds += self._events.driver.elapsed(before, after)
            self._events.release(before)
            self._events.release(after)
        return seconds
