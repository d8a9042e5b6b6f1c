"""Make fences of CUDA events: done when all work submitted to some streams has ended.

Used by the GPU's vm, link, runner and layer streams to know when pages may be reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.memory.cuda.calls import Driver


class EventFence:
    """Implements `Fence`. Its events return to their pool once they are found to be done."""

    __slots__ = ("_events", "_pool")

    def __init__(self, pool: EventPool, events: list[int]) -> None:
        self._pool, self._events = pool, events

    def done(self) -> bool:
        """Return whether the work has ended. Raises DeviceError if it has failed."""
        while self._events:
            if not self._pool.driver.is_done(self._events[-1]):
                return False
            self._pool.release(self._events.pop())
        return True


class EventPool:
    """Reusable CUDA events of one device, since making one takes a driver call."""

    def __init__(self, driver: Driver, timed: bool = False) -> None:
        """`timed`: events record their time, which costs the streams a little."""
        self.driver, self._timed = driver, timed
        self._made: list[int] = []
        self._unused: list[int] = []

    def after(self, streams: Sequence[int]) -> EventFence:
        """Return a fence for all work that these streams have now. A context must be current."""
        recorded: list[int] = []
        for stream in streams:
            event = self.acquire()
            # If this fails, the events recorded so far are in flight, and are not used again.
            self.driver.record(event, stream)
            recorded.append(event)
        return EventFence(self, recorded)

    def acquire(self) -> int:
        """Return an event that nothing waits for, to be recorded."""
        if self._unused:
            return self._unused.pop()
        event = self.driver.new_event(self._timed)
        self._made.append(event)
        return event

    def release(self, event: int) -> None:
        """Return an event that was found done, or was never recorded."""
        self._unused.append(event)

    def close(self) -> None:
        """Destroy all events. Fences made here must not be used any more."""
        self._unused.clear()
        while self._made:
            self.driver.destroy_event(self._made.pop())


class StreamStalls:
    """Measures how long streams wait for events of others, by their own clock."""

    def __init__(self, events: EventPool) -> None:
        """`events`: a pool of timed events."""
        self._events = events
        self._waits: list[tuple[int, int]] = []
        """Events before and after each wait since the last `seconds`."""

    def wait_for(self, stream: int, event: int) -> None:
        """Have later work of the stream begin after the event. Returns at once."""
        driver, before, after = self._events.driver, self._events.acquire(), self._events.acquire()
        driver.record(before, stream)
        driver.wait_for(stream, event)
        driver.record(after, stream)
        self._waits.append((before, after))

    def seconds(self) -> float:
        """Return the seconds of all waits since the last call; the streams must have passed
        them."""
        waits, self._waits = self._waits, []
        seconds = 0.0
        for before, after in waits:
            seconds += self._events.driver.elapsed(before, after)
            self._events.release(before)
            self._events.release(after)
        return seconds
