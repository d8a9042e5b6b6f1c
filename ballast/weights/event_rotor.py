"""The rotor of a GPU: streams wait for each other's events, and the host for none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ballast.core.job import SequenceWork
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.copies import Copy
from ballast.memory.cuda_calls import Driver
from ballast.memory.cuda_events import Events
from ballast.weights.rotor import Loads

_NOBODY = -1


class EventRotor:
    """Implements `Rotor`, and `ballast.models.barriers.Barriers` for the jobs.

    A layer is copied after the event that follows the last use of its slot, and run after the event
    that follows its copy. What a stream waits for is not seen here: jobs that waited say that they
    did not, and loads have no seconds.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        copies: Sequence[Copy],
        stream: Callable[[], int],
        settled: Callable[[], None],
    ) -> None:
        """`context`: of the device, retained as long as this is used; `copies`: that bring each
        layer; `stream`: that the calling lane's work goes to; `settled`: called by any thread."""
        self.loads = Loads()
        self.rotation = WHOLE
        self._driver, self._context = driver, context
        self._copies, self._lane, self._settled = copies, stream, settled
        driver.set_current(context)
        self._stream = driver.new_stream()
        self._events = Events(driver)
        self._landed: dict[int, int] = {}
        """By layer, the event after its copy; it may be reached."""
        self._past: list[int] = []
        """Events that are waited for no more, but perhaps not reached."""
        self._held: list[int] = []
        """By slot, the layer that was brought there last."""
        self._next: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        self._lock = threading.Lock()
        """A pass and the loop's turn are never at the same time; reports may be."""

    # -- the loop's thread ------------------------------------------------------------------------

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._held)

    def settle(self) -> None:
        threading.Thread(target=self._settle, name="settle", daemon=True).start()

    def turn(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        with self._lock:
            self._driver.set_current(self._context)
            self.rotation = rotation
            self._slot_of, self._next = rotation.slot_of, rotation.next_of
            self._past += self._landed.values()
            self._landed.clear()
            self._held = list(held)
            first = rotation.layers[: rotation.slots]
            wanted = [layer for slot, layer in enumerate(first) if held[slot] != layer]
            self._held[:] = first
            for layer in sorted([*missing, *wanted]):
                self._load(layer)

    def forget(self) -> None:
        self.turn(WHOLE, (), ())

    def rest(self) -> None:
        """Return when nothing is on its way. No job runs; the context is current."""
        self._driver.finish(self._stream)

    def close(self) -> None:
        """No job runs."""
        self._driver.set_current(self._context)
        self._driver.finish(self._stream)
        self._events.close()
        self._driver.destroy_stream(self._stream)

    # -- a lane's thread --------------------------------------------------------------------------

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> frozenset[int]:
        """Layers that rotate, or were brought since. Where the last pass broke off, slots are not
        what the first layers need: they are brought, as all that it launched has ended."""
        with self._lock:
            self._tidy()
            for slot, first in enumerate(self.rotation.layers[: self.rotation.slots]):
                if self._held[slot] != first:
                    self._replace(slot, first)
            return frozenset(self._slot_of) | frozenset(self._landed)

    def wait(self, layer: int) -> None:
        """Kernels launched from here on run when it is there. Returns at once."""
        event = self._landed.get(layer)
        if event is not None:
            self._driver.wait_for(self._lane(), event)

    def used(self, layer: int) -> None:
        """Once what was launched so far has ended, the next of its slot takes its place."""
        following = self._next.get(layer, layer)
        if following == layer:
            return
        with self._lock:
            event = self._events.take()
            self._driver.record(event, self._lane())
            self._driver.wait_for(self._stream, event)
            self._past.append(event)
            self._replace(self._slot_of[layer], following)

    def stalled(self) -> float:
        return 0.0

    # -- inside -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._driver.set_current(self._context)
        self._driver.finish(self._stream)
        self._settled()

    def _replace(self, slot: int, layer: int) -> None:
        before = self._landed.pop(self._held[slot], None)
        if before is not None:
            self._past.append(before)
        self._held[slot] = layer
        self._load(layer)

    def _load(self, layer: int) -> None:
        copy = self._copies[layer]
        self._driver.copy_to_device(copy.dst, copy.src, copy.n_bytes, self._stream)
        self._landed[layer] = event = self._events.take()
        self._driver.record(event, self._stream)
        self.loads.n += 1
        self.loads.n_bytes += copy.n_bytes

    def _tidy(self) -> None:
        """Events that are reached can be used again; layers that stay need not be waited for."""
        for layer, event in list(self._landed.items()):
            if layer not in self._slot_of and self._driver.is_done(event):
                self._events.put_back(self._landed.pop(layer))
        waited, self._past = self._past, []
        for event in waited:
            if self._driver.is_done(event):
                self._events.put_back(event)
            else:
                self._past.append(event)
