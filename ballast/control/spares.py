"""Keep one prepared worker process in reserve on a host: start it, give it up, start another.

A pure state machine, `handle(now, event) -> instructions`, without processes or clocks. The server
drives it (`cluster.worker.spare_worker`), and in virtual time `sim.peer_costs` and
`benchmarks.fault_spares`.

A spare is prepared at the lowest priority, which takes minutes on a busy host. So it is not the
time of a clock that shows a hang: a spare that does nothing for `idle_seconds` while it is prepared
hangs, and so does one that has used `busy_seconds` of processor time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

RETRY_SECONDS, LONGEST_RETRY_SECONDS = 60.0, 3600.0
"""Time until a spare is started after two failed in a row; it doubles with each further one."""
STEADY_SECONDS = 60.0
"""Time for which a prepared spare has to wait for its end to begin a new count of failures."""


@dataclass(frozen=True, slots=True)
class SpareWantedEvent:
    """A spare is to be kept from now on."""


@dataclass(frozen=True, slots=True)
class SpareActiveEvent:
    """A spare that is being prepared has done something."""

    number: int
    used: float
    """Seconds of processor time that it has used in all."""


@dataclass(frozen=True, slots=True)
class SparePreparedEvent:
    """A spare waits to be taken."""

    number: int


@dataclass(frozen=True, slots=True)
class SpareEndedEvent:
    """A spare's process has ended, or could not be started."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class SpareDueEvent:
    """`Spares.due` may have come."""


SpareEvent = (
    SpareWantedEvent | SpareActiveEvent | SparePreparedEvent | SpareEndedEvent | SpareDueEvent
)


@dataclass(frozen=True, slots=True)
class PrepareSpare:
    """Start a process and prepare it; `SparePreparedEvent` or `SpareEndedEvent` follows."""

    number: int


@dataclass(frozen=True, slots=True)
class EndSpare:
    """Kill a spare that hangs; nothing about it is awaited."""

    number: int
    why: str


SpareInstruction = PrepareSpare | EndSpare


class Spares:
    """The one spare of a host, and when the next is started."""

    def __init__(self, idle_seconds: float, busy_seconds: float) -> None:
        """Bounds of a preparation: `idle_seconds` in which it does nothing, `busy_seconds` of
        processor time."""
        self.idle_seconds, self.busy_seconds = idle_seconds, busy_seconds
        self._last = 0
        self._number: int | None = None
        """The spare that there is."""
        self._prepared_at: float | None = None
        """Since when it waits; None: it is being prepared."""
        self._active_at = 0.0
        """When it last did something."""
        self._failures = 0
        """Spares that have failed in a row."""
        self._retry_at = inf
        """When the next one is started; inf: not before it is wanted again."""

    @property
    def due(self) -> float:
        """When `SpareDueEvent` does something; inf: never."""
        if self._number is None:
            return self._retry_at
        return inf if self._prepared_at is not None else self._active_at + self.idle_seconds

    @property
    def ready(self) -> int | None:
        """The spare that waits to be taken; None: there is none."""
        return self._number if self._prepared_at is not None else None

    def take(self) -> int | None:
        """Return the spare that waits, which the caller then owns; None if there is none. The next
        one is started when it is wanted.

        One that is being prepared goes on, for the next caller: workers that die one after the
        other would never find a spare.
        """
        taken = self.ready
        if taken is not None:
            self._number = self._prepared_at = None
            self._failures, self._retry_at = 0, inf
        return taken

    def handle(self, now: float, event: SpareEvent) -> list[SpareInstruction]:
        """Return what is to be done after an event at `now`, in seconds, which do not go back."""
        match event:
            case SpareWantedEvent():
                return [] if self._number is not None else [self._start(now)]
            case SpareActiveEvent(number, used) if number == self._number:
                self._active_at = now
                if self._prepared_at is None and used > self.busy_seconds:
                    why = (
                        f"its preparation used more than {self.busy_seconds:g} s of processor time"
                    )
                    return self._give_up(now, why)
            case SparePreparedEvent(number) if number == self._number:
                self._prepared_at = now
            case SpareEndedEvent(number) if number == self._number:
                return self._failed(now)
            case SpareDueEvent() if now >= self.due:
                if self._number is None:
                    return [self._start(now)]
                why = f"its preparation did nothing for {self.idle_seconds:g} s"
                return self._give_up(now, why)
        return []

    def _start(self, now: float) -> PrepareSpare:
        self._last += 1
        self._number, self._prepared_at, self._retry_at = self._last, None, inf
        self._active_at = now
        return PrepareSpare(self._last)

    def _give_up(self, now: float, why: str) -> list[SpareInstruction]:
        assert self._number is not None
        return [EndSpare(self._number, why), *self._failed(now)]

    def _failed(self, now: float) -> list[SpareInstruction]:
        """Start another: at once after the first failure, later after further ones."""
        if self._prepared_at is not None and now - self._prepared_at >= STEADY_SECONDS:
            self._failures = 0
        self._failures += 1
        self._number = self._prepared_at = None
        if self._failures == 1:
            return [self._start(now)]
        wait = RETRY_SECONDS * 2 ** min(self._failures - 2, 10)
        self._retry_at = now + min(LONGEST_RETRY_SECONDS, wait)
        return []
