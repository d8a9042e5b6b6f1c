"""Load rotating layers on a GPU, ordered with the jobs' kernels by CUDA events.

Streams wait for each other's events on the device; the host does not wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ballast.core.errors import DeviceError
from ballast.core.job import SequenceWork
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.fences import EventPool, StreamStalls
from ballast.weights.rotation_slots import NOBODY, RotationSlots
from ballast.weights.rotor import ArrivalPlan, Loads

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A copy in flight, between two events that record when they were reached."""

    layer: int
    n_bytes: int
    began: int
    ended: int


class EventRotor:
    """Implements `Rotor`, and `ballast.models.barriers.Barriers` for the jobs.

    A layer is copied after the event that follows the last use of its slot, and run after the event
    that follows its copy. The durations of copies, and of stalls of lanes' streams, are read from
    the events around them once these are reached, so that the host never waits for them.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        copies: Sequence[Copy],
        stream: Callable[[], int],
        settled: Callable[[], None],
    ) -> None:
        """`context`: of the device, retained as long as this is used; `copies`: load each layer;
        `stream`: returns the stream of the calling lane's work; `settled`: called by any thread."""
        self.loads = Loads()
        self._slots = RotationSlots()
        self._driver, self._context = driver, context
        self._copies, self._lane, self._settled = copies, stream, settled
        driver.set_current(context)
        self._stream = driver.new_stream()
        self._events, self._timed = EventPool(driver), EventPool(driver, timed=True)
        self._flights: deque[_Flight] = deque()
        """Copies in flight, in the order of their stream."""
        self._landing: dict[int, int] = {}
        """By layer, the event after its copy, if not known to be reached."""
        self._past: list[int] = []
        """Events of lanes' streams that are not known to be reached."""
        self._stalls = StreamStalls(self._timed)
        self._lock = threading.Lock()
        """Passes and the loop's turns never run at the same time, but reports may."""

    # -- the loop's thread ------------------------------------------------------------------------

    @property
    def rotation(self) -> Rotation:
        return self._slots.rotation

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._slots.held)

    def settle(self) -> None:
        threading.Thread(target=self._settle, name="settle", daemon=True).start()

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        with self._lock:
            self._driver.set_current(self._context)
            self._landing.clear()
            self._slots.remap(rotation, held)
            lacking = self._slots.lacking()
            for slot, layer in lacking:
                self._slots.put(slot, layer)
            for layer in sorted([*missing, *(layer for _, layer in lacking)]):
                self._load(layer)

    def forget(self) -> None:
        self.remap(WHOLE, (), ())

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        """Return False: a GPU's weights are loaded over streams of its link, whose events are not
        available here."""
        return False

    def rest(self) -> None:
        """Return when no copy is in flight. No job may run; the context is current."""
        self._driver.finish(self._stream)
        with self._lock:
            self._look()

    def close(self) -> None:
        """Wait for the copies, and free events and stream. No job may run."""
        self._driver.set_current(self._context)
        self._driver.finish(self._stream)
        self._events.close()
        self._timed.close()
        self._driver.destroy_stream(self._stream)

    # -- a lane's thread --------------------------------------------------------------------------

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> frozenset[int]:
        """Return the layers that rotate, or were loaded since the last pass.

        If the last pass broke off, slots do not hold the first layers: these are loaded, as all
        work that it launched has ended.
        """
        with self._lock:
            self._look()
            for slot, first in self._slots.lacking():
                self._replace(slot, first)
            return frozenset(self._slots.slot_of) | frozenset(self._landing)

    def wait(self, layer: int) -> None:
        """Make kernels launched from here on wait for the layer, on the device; returns at once."""
        with self._lock:
            event = self._landing.get(layer)
            if event is not None:
                self._stalls.wait_for(self._lane(), event)

    def used(self, layer: int) -> None:
        """Load the next layer of the slot once the work launched so far has ended."""
        following = self._slots.following(layer)
        if following is None:
            return
        with self._lock:
            event = self._events.acquire()
            self._driver.record(event, self._lane())
            self._driver.wait_for(self._stream, event)
            self._past.append(event)
            self._replace(*following)

    def stalled(self) -> float:
        """Return the seconds that lanes' streams have waited for layers since the last call. The
        work launched by then must have ended."""
        with self._lock:
            seconds = self._stalls.seconds()
            self.loads.stall_seconds += seconds
            self._look()
            return seconds

    # -- inside -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        try:
            self._driver.set_current(self._context)
            self._driver.finish(self._stream)
            with self._lock:
                self._look()
        except DeviceError as error:
            log.error("copies of layers cannot be waited for: %s", error)
        finally:
            self._settled()  # code that waits for a copy gets the same error

    def _replace(self, slot: int, layer: int) -> None:
        # The next pass tries again where the copy cannot be launched.
        self._landing.pop(self._slots.put(slot, NOBODY), None)
        self._load(layer)
        self._slots.put(slot, layer)

    def _load(self, layer: int) -> None:
        copy, began, ended = self._copies[layer], self._timed.acquire(), self._timed.acquire()
        self._driver.record(began, self._stream)
        self._driver.copy_to_device(copy.dst, copy.src, copy.n_bytes, self._stream)
        self._driver.record(ended, self._stream)
        self._landing[layer] = ended
        self._flights.append(_Flight(layer, copy.n_bytes, began, ended))

    def _look(self) -> None:
        """Count loads that have landed, which need no wait any more, and reuse their events."""
        while self._flights and self._driver.is_done(self._flights[0].ended):
            flight = self._flights.popleft()
            self.loads.n += 1
            self.loads.n_bytes += flight.n_bytes
            self.loads.copy_seconds += self._driver.elapsed(flight.began, flight.ended)
            if self._landing.get(flight.layer) == flight.ended:
                del self._landing[flight.layer]
            self._timed.release(flight.began)
            self._timed.release(flight.ended)
        waited, self._past = self._past, []
        for event in waited:
            if self._driver.is_done(event):
                self._events.release(event)
            else:
                self._past.append(event)
