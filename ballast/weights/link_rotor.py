"""Load rotating layers on a CPU device over the host link, as jobs advance from layer to layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.job import SequenceWork
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.weights.rotation_slots import NOBODY, RotationSlots
from ballast.weights.rotor import ArrivalPlan, Loads


class LinkRotor:
    """Implements `Rotor`, and `ballast.models.barriers.Barriers` for the jobs.

    A slot's next layer is loaded as soon as the present one has been used; at the end of a pass,
    the first layers of the next pass. A layer whose load failed fails the pass that reaches it, and
    is loaded once more by the next pass. The loop's thread remaps and settles, lanes run passes,
    the link's thread reports loads that have ended.

    While the model's weights are loading, passes wait for its layers likewise (`start_load`);
    layers that this load fails to bring are not loaded again.
    """

    def __init__(
        self,
        model: str,
        copies: Sequence[Copy],
        link: HostLink,
        clock: Clock,
        settled: Callable[[], None],
        opened: Callable[[int], None] | None = None,
    ) -> None:
        """`settled`, and `opened` with the transfer, notify the loop; they are called by any
        thread. Without `opened`, jobs wait for whole loads of the model's weights."""
        self.loads = Loads()
        self._slots = RotationSlots()
        self._stream = f"rotation:{model}"
        self._copies, self._link, self._clock = copies, link, clock
        self._settled, self._opened = settled, opened
        self._change = threading.Condition()
        self._ready = bytearray(b"\1") * len(copies)
        """By layer, 1 if its bytes are at its address."""
        self._flying: set[int] = set()
        """Layers in flight."""
        self._touched: set[int] = set()
        """Layers that may have been loaded since they were last mapped."""
        self._broken: dict[int, str] = {}
        """Layers whose load failed, and why."""
        self._arrival: _Arrival | None = None
        """The last load of all weights during which jobs may run."""
        self._settling = False
        self._stalled = 0.0
        """Seconds of stalls since the last call of `stalled`."""
        self._busy = False
        """Whether layers rotate, or some may be in flight."""

    # -- the loop's thread ------------------------------------------------------------------------

    @property
    def rotation(self) -> Rotation:
        return self._slots.rotation

    @property
    def held(self) -> tuple[int, ...]:
        with self._change:
            return tuple(i if i >= 0 and self._ready[i] else NOBODY for i in self._slots.held)

    def settle(self) -> None:
        with self._change:
            self._settling = True
            quiet = not self._flying
        if quiet:
            self._settled()

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        self._begin(rotation, held, missing)

    def forget(self) -> None:
        self._broken.clear()
        self._begin(WHOLE, (), ())

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        if self._opened is None:
            return False
        arrival = _Arrival(self, transfer_id, coming)
        with self._change:
            self._end_arrival()
            self._arrival, self._busy = arrival, True
            for layer in coming.layers:
                self._ready[layer] = False
        try:
            self._link.start(transfer_id, copies, watch=arrival)
        except DeviceError:
            with self._change:
                self._end_arrival()
            raise
        return True

    def _begin(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        with self._change:
            self._end_arrival()
            self._settling, self._busy = False, True
            # Only this rotor records that a layer with memory of its own is not present.
            slots, broken = self._slots, set(self._broken)
            slots.remap(rotation, [NOBODY if layer in broken else layer for layer in held])
            for layer in range(len(self._ready)):
                self._ready[layer] = layer not in slots.slot_of
            for layer in slots.held:
                if layer >= 0:
                    self._ready[layer] = True
            self._touched.clear()
            wanted = {*missing, *(broken - slots.slot_of.keys())}
            self._broken.clear()
            for slot, layer in slots.lacking():
                self._replace(slot, layer)
                wanted.add(layer)
            for layer in sorted(wanted):
                self._load(layer)

    # -- a lane's thread --------------------------------------------------------------------------

    def begin_pass(self, work: Sequence[SequenceWork] = ()) -> frozenset[int]:
        """Return the layers that rotate, or are not present yet.

        If the last pass broke off, slots do not hold the first layers: these are loaded, as are
        layers whose load failed before.
        """
        if not self._busy:
            return frozenset()
        with self._change:
            slots = self._slots
            for slot, first in slots.lacking():
                while slots.held[slot] in self._flying:
                    self._change.wait()
                self._replace(slot, first)
                self._load(first)
            for layer in sorted(self._broken):
                self._load(layer)
            stops = frozenset(slots.slot_of) | self._flying | self._broken.keys()
            if self._arrival is not None:
                stops |= self._arrival.missing
            self._busy = bool(stops)
            return stops

    def wait(self, layer: int) -> None:
        """Wait until the layer is present. Raises DeviceError if it cannot be loaded."""
        if self._ready[layer]:
            return
        began = self._clock.now()
        with self._change:
            arrives = self._arrival is not None and layer in self._arrival.missing
            while not self._ready[layer]:
                why = self._broken.get(layer)
                if arrives and self._arrival is not None:
                    why = self._arrival.error
                if why is not None:
                    raise DeviceError("link", f"a layer could not be brought: {why}")
                self._change.wait()
            seconds = self._clock.now() - began
            self._stalled += seconds
            if not arrives:
                self.loads.stall_seconds += seconds

    def used(self, layer: int) -> None:
        """Mark a layer as used by the job: the next layer of its slot is loaded in its place."""
        following = self._slots.following(layer)
        if following is None:
            return
        with self._change:
            self._replace(*following)
            self._load(following[1])

    def stalled(self) -> float:
        """Return the seconds that jobs have waited for layers since the last call."""
        seconds, self._stalled = self._stalled, 0.0
        return seconds

    # -- the link's thread ------------------------------------------------------------------------

    def _landed(self, layer: int, done: TransferDoneEvent) -> None:
        with self._change:
            self._flying.discard(layer)
            if done.error is None:
                self._ready[layer] = True
                self.loads.n += 1
                self.loads.n_bytes += done.n_bytes
                self.loads.copy_seconds += done.seconds
            else:
                self._broken[layer] = done.error
            self._change.notify_all()
            quiet = self._settling and not self._flying
        if quiet:
            self._settled()

    def _weights_landed(self, arrival: _Arrival, n_bytes: int) -> None:
        """Handle progress of a load of all weights: `n_bytes` bytes are present."""
        with self._change:
            if arrival is not self._arrival:
                return
            for layer in sorted(arrival.missing):
                if arrival.coming.layers[layer] > n_bytes:
                    break
                arrival.missing.discard(layer)
                self._ready[layer] = True
            self._change.notify_all()
            opens = not arrival.opened and n_bytes >= arrival.coming.opens
            arrival.opened = arrival.opened or opens
        if opens and self._opened is not None:
            self._opened(arrival.transfer_id)

    def _weights_ended(self, arrival: _Arrival, error: str | None) -> None:
        with self._change:
            if arrival is not self._arrival:
                return
            arrival.error = error
            if error is None:
                self._end_arrival()
            self._change.notify_all()

    # -- under the lock ---------------------------------------------------------------------------

    def _end_arrival(self) -> None:
        """End waits for a load of all weights: all of it is present, or evicted."""
        if self._arrival is not None:
            for layer in self._arrival.missing:
                self._ready[layer] = True
            self._arrival = None

    def _replace(self, slot: int, layer: int) -> None:
        """Assign the slot to the layer."""
        before = self._slots.put(slot, layer)
        if before >= 0:
            self._ready[before] = False
            self._broken.pop(before, None)

    def _load(self, layer: int) -> None:
        self._ready[layer] = False
        self._broken.pop(layer, None)
        self._flying.add(layer)
        copy = replace(self._copies[layer], touched=layer in self._touched)
        self._touched.add(layer)
        try:
            self._link.start(
                layer,
                [copy],
                self._stream,
                on_done=lambda done: self._landed(layer, done),
            )
        except DeviceError as error:
            self._flying.discard(layer)
            self._broken[layer] = str(error)


class _Arrival:
    """Follows the transfer that loads all weights of a model (`memory.transfer.TransferWatch`)."""

    def __init__(self, rotor: LinkRotor, transfer_id: int, coming: ArrivalPlan) -> None:
        self.transfer_id, self.coming = transfer_id, coming
        self.missing = set(coming.layers)
        """Layers that have not landed. This and the following are changed under the rotor's
        lock."""
        self.opened = False
        self.error: str | None = None
        """Why the missing layers will not come; None: they may."""
        self._rotor = rotor

    def landed(self, n_bytes: int) -> None:
        self._rotor._weights_landed(self, n_bytes)

    def ended(self, error: str | None) -> None:
        self._rotor._weights_ended(self, error)
