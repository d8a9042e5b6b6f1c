"""Simulate rotating layers: loads are flows on the link, and jobs wait for layers in transfer.

`SimRotor` implements `weights.rotor.Rotor`. Used by `sim.device` and `sim.runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ballast.core.clock import Clock
from ballast.core.event import FirstJobReadyEvent, RotationSettledEvent
from ballast.core.link import Direction
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.copies import Copy
from ballast.sim.event_heap import EventHeap
from ballast.sim.layer_passes import Pass
from ballast.sim.link import SimLink
from ballast.weights.rotation_slots import RotationSlots
from ballast.weights.rotor import ArrivalPlan, Loads


class SimRotor:
    """Implements `weights.rotor.Rotor`, and `sim.layer_passes.LayerSource` for the model's jobs.

    A layer is loaded as soon as the job is done with the one before it in its slot. A model's loads
    are a stream of their own on the device's link, as they are live.
    """

    open = False

    def __init__(
        self,
        spec: ModelSpec,
        copies: Sequence[Copy],
        heap: EventHeap,
        clock: Clock,
        link: SimLink,
        loads: Loads,
        begun: Callable[[SimRotor], None],
        early: bool = False,
    ) -> None:
        """`loads`: counted on; `begun` is called when jobs may have to wait from then on; `early`:
        whether they begin while the model's weights arrive."""
        self.loads = loads
        self._begun, self._early, self._link = begun, early, link
        self._arriving: dict[int, int] = {}
        """Layers of a load of all weights that are not there, and after how many of its bytes each
        will be."""
        self._arrived = False
        """Whether layers now arrive with a load of all weights."""
        self._name, self._heap, self._clock = spec.name, heap, clock
        self._stream = link.stream(f"rotation:{spec.name}", Direction.TO_DEVICE)
        self._bytes = [copy.n_bytes for copy in copies]
        self._flying: set[int] = set()
        """Layers on their way, or waiting for the link."""
        self._absent: set[int] = set()
        """Layers whose weights are not where jobs read them."""
        self._settling = False
        self._job: Pass | None = None
        """The job that began last."""
        self._slots = RotationSlots()
        self._order: tuple[int, ...] = ()
        """Layers that share their slot, ascending."""

    @property
    def held(self) -> Sequence[int]:
        return tuple(self._slots.held)

    def settle(self) -> None:
        self._settling = True
        self._tell_settled(self._clock.now())

    def remap(self, rotation: Rotation, held: Sequence[int], missing: Sequence[int]) -> None:
        now = self._clock.now()
        self._begun(self)
        self._lay(rotation, held)
        self._absent = {*rotation.layers} - {*held}
        lacking = {layer: slot for slot, layer in self._slots.lacking()}
        for layer in sorted({*lacking, *missing}):
            slot = lacking.get(layer)
            if slot is None:
                self._load(now, layer)
            else:
                self._replace(now, slot, layer)

    def forget(self) -> None:
        self._lay(WHOLE, ())
        self._arriving = {}

    def start_load(self, transfer_id: int, copies: Sequence[Copy], coming: ArrivalPlan) -> bool:
        if not self._early:
            return False
        self._begun(self)
        self._arriving = dict(coming.layers)
        self._link.start(transfer_id, copies, watch=_Arrival(self, transfer_id, coming))
        return True

    def let_begin(self, now: float, transfer_id: int) -> None:
        """Allow the first job to begin."""
        self._heap.schedule(now, FirstJobReadyEvent(transfer_id))

    def arrived(self, now: float, n_bytes: int) -> None:
        """Notify waiting jobs of layers in the first `n_bytes` of a load of all weights."""
        there = [layer for layer, after in self._arriving.items() if after <= n_bytes]
        for layer in there:
            del self._arriving[layer]
        self._arrived = True
        for layer in there:
            if self._job is not None:
                self._job.landed(now, layer)
        self._arrived = False

    # -- for jobs ---------------------------------------------------------------------------------

    @property
    def stops(self) -> Sequence[int]:
        if not self._arriving and self._flying <= self._slots.next_of.keys():
            return self._order
        return sorted({*self._order, *self._flying, *self._arriving})

    @property
    def waits(self) -> bool:
        return bool(self._order or self._flying or self._arriving)

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        self._job = job

    def lacks(self, layer: int) -> bool:
        return layer in self._absent or layer in self._arriving

    def used(self, now: float, layer: int) -> None:
        following = self._slots.following(layer)
        if following is not None:
            self._replace(now, *following)

    def waited(self, seconds: float) -> None:
        if not self._arrived:
            self.loads.stall_seconds += seconds

    # -- inside -----------------------------------------------------------------------------------

    def _lay(self, rotation: Rotation, held: Sequence[int]) -> None:
        """`rotation` is in force, and no load on its way; `held`: as of `remap`."""
        self._slots.remap(rotation, held)
        self._order = tuple(self._slots.next_of)
        self._absent = set()
        self._settling = False

    def _replace(self, now: float, slot: int, layer: int) -> None:
        """Give the slot to the layer."""
        before = self._slots.put(slot, layer)
        if before in self._slots.slot_of:
            self._absent.add(before)
        self._load(now, layer)

    def _load(self, now: float, layer: int) -> None:
        self._flying.add(layer)
        self._absent.add(layer)
        self._stream.carry(now, self._bytes[layer], partial(self._landed, layer))

    def _landed(self, layer: int, now: float, seconds: float) -> None:
        self._flying.remove(layer)
        self._absent.discard(layer)
        self.loads.n += 1
        self.loads.n_bytes += self._bytes[layer]
        self.loads.copy_seconds += seconds
        if self._job is not None:
            self._job.landed(now, layer)
        self._tell_settled(now)

    def _tell_settled(self, now: float) -> None:
        if self._settling and not self._flying:
            self._settling = False
            self._heap.schedule(now, RotationSettledEvent(self._name))


class _Arrival:
    """Follows the transfer that brings all weights of a model (`sim.link.LandingWatch`)."""

    def __init__(self, rotor: SimRotor, transfer_id: int, coming: ArrivalPlan) -> None:
        self._rotor, self._id, self._coming = rotor, transfer_id, coming
        self._opened = False
        later = (n for n in coming.layers.values() if n > coming.opens)
        self.marks = [coming.opens, *sorted(later)]

    def landed(self, now: float, n_bytes: int) -> None:
        if not self._opened and n_bytes < self.marks[-1]:
            self._opened = True
            self._rotor.let_begin(now, self._id)
        self._rotor.arrived(now, n_bytes)


class SimRotors:
    """The rotors of a device's models, by name."""

    def __init__(self, heap: EventHeap, clock: Clock, link: SimLink, early: bool = False) -> None:
        """`early`: whether first jobs begin while weights arrive."""
        self._heap, self._clock, self._link, self._early = heap, clock, link, early
        self._rotors: dict[str, SimRotor] = {}
        """Rotors that have rotated layers, or begun a job early; a new model that is refused has
        none."""
        self.loads: dict[str, Loads] = {}
        """Costs of rotations by model, including models that have left."""

    def make(self, spec: ModelSpec, copies: Sequence[Copy]) -> SimRotor:
        loads = self.loads.setdefault(spec.name, Loads())
        begun = partial(self._rotors.__setitem__, spec.name)
        return SimRotor(
            spec, copies, self._heap, self._clock, self._link, loads, begun, self._early
        )

    def of(self, model: str) -> SimRotor | None:
        """Return the model's rotor; None if it has never rotated layers or begun a job early."""
        return self._rotors.get(model)
