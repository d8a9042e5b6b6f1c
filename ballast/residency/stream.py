"""Order the copies of one model's passes: each layer's content before its use, its slot after it.

Driven by `live`, `sim` and groups of ranks, which run passes and make the copies::

    event                copies that follow, with what they wait for
    change               first layers of slots, and layers that are home again without bytes
    begin_pass           the same where a pass broke off or a load failed; written: first layers
    used 0, 2, ...       written: the store of the layer; then the load of the next in its slot
    landed, failed       those that waited for it

No lock, thread, clock or I/O: drivers have these. The rules of the papers are checked here, and a
driver that breaks one gets BrokenPromise:

- a slot is filled when its last reader has ended, and if written, when its content is stored;
- MIRAGE, 4.1: read-only slots end a pass with the first layers of the next;
- SwiftCache: with one written slot, layer i is loaded after attention and store of layer i - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ballast.core.errors import BrokenPromise
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.residency.arrival import Arrival, ArrivalPlan
from ballast.residency.buffer import HOME, NOBODY, Buffer, LayerCopy


class LayerStream:
    """State machine of the copies of one model, weights and KV alike, through any buffers.

    Each event returns the copies to submit now, in order. A pass reads a layer when `lacks` is
    false, or, where copies are submitted ahead, behind the copies in `awaited`. Passes of one model
    follow each other; one that broke off is followed by `begin_pass` like any other.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        """`ahead`: copies are returned at once, and their engine makes each wait for what it names
        in `after_use` and `after`; otherwise a copy is returned when all that has happened."""
        self.buffers: list[Buffer] = []
        self.failure: str | None = None
        """Why content that the present pass has written is not stored."""
        self._ahead = ahead
        self._flying: dict[int, LayerCopy] = {}
        """Copies that have not ended, those not yet returned among them."""
        self._submitted = 0

    def add(self, name: str, *, written: bool) -> Buffer:
        """Add a buffer in which no layer rotates; returns it."""
        buffer = Buffer(name, written=written)
        self.buffers.append(buffer)
        return buffer

    # -- what it is -------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether no copy is in flight."""
        return not self._flying

    @property
    def in_flight(self) -> list[LayerCopy]:
        """Copies that have not ended."""
        return list(self._flying.values())

    @property
    def waits(self) -> bool:
        """Whether a pass that begins now has stops."""
        return any(b.slot_of or b.absent for b in self.buffers)

    @property
    def open(self) -> bool:
        """Whether copies of written content are in flight: the pass must not end yet."""
        return any(copy.buffer.written for copy in self._flying.values())

    @property
    def stops(self) -> Sequence[int]:
        """Layers, ascending, at which the pass that has begun calls `lacks` and `used`."""
        stops = [found for b in self.buffers if (found := b.stops)]
        if len(stops) < 2:
            return stops[0] if stops else ()
        return sorted({layer for found in stops for layer in found})

    def lacks(self, layer: int) -> bool:
        """Whether any of a layer's content has not landed."""
        return any(layer in buffer.absent for buffer in self.buffers)

    def awaited(self, layer: int) -> list[LayerCopy]:
        """Return the copies in flight behind which a layer may be read."""
        return [b.loading[layer] for b in self.buffers if layer in b.loading]

    def fault(self, layer: int) -> str | None:
        """Return why a layer that is lacking will not come in this pass; None: it may."""
        for buffer in self.buffers:
            if (why := buffer.fault(layer)) is not None:
                return why
        return None

    # -- between passes ---------------------------------------------------------------------------

    def change(
        self,
        buffer: Buffer,
        rotation: Rotation,
        held: Sequence[int] = (),
        missing: Iterable[int] = (),
    ) -> list[LayerCopy]:
        """Put `rotation` in force in a buffer, none of whose copies may be in flight.

        `held`: by slot, the layer whose bytes it holds, or `NOBODY`; `missing`: layers that are
        home again, without bytes. Read-only content is loaded at once, written content by passes.
        """
        self._must(not any(c.buffer is buffer for c in self._flying.values()), buffer, "copies fly")
        self._end_arrival(buffer)
        # The stream alone knows that a layer with a place of its own is not there.
        broken = set(buffer.broken)
        buffer.broken.clear()
        if buffer.written:
            buffer.lay(rotation, ())
            return []
        buffer.lay(rotation, [NOBODY if layer in broken else layer for layer in held])
        return self._refill(buffer, {*missing, *(broken - buffer.slot_of.keys())})

    def forget(self, buffer: Buffer) -> None:
        """Note that content has been evicted, rotating layers at least: none rotates, none is
        awaited. Layers whose load failed may still be home: the next pass tries them again."""
        broken = dict(buffer.broken)
        buffer.broken.clear()
        self.change(buffer, WHOLE)
        buffer.broken = broken
        buffer.absent.update(broken)

    # -- an arrival -------------------------------------------------------------------------------

    def expect(self, buffer: Buffer, plan: ArrivalPlan) -> Arrival:
        """Note a transfer that brings layers home; passes wait for them. It replaces another."""
        self._end_arrival(buffer)
        buffer.arrival = Arrival(plan)
        buffer.absent |= plan.layers.keys()
        return buffer.arrival

    def arrived(self, buffer: Buffer, arrival: Arrival, n_bytes: int) -> bool:
        """Note that `n_bytes` of the transfer have landed; returns whether the first job may begin
        from now on. Nothing happens if the arrival has been replaced or forgotten."""
        if arrival is not buffer.arrival:
            return False
        buffer.absent.difference_update(arrival.land(n_bytes))
        return arrival.opens(n_bytes)

    def arrival_ended(self, buffer: Buffer, arrival: Arrival, error: str | None) -> None:
        """Note the end of the transfer; where it failed, missing layers fail passes from now on."""
        if arrival is buffer.arrival:
            arrival.error = error
            if error is None:
                self._end_arrival(buffer)

    # -- a pass -----------------------------------------------------------------------------------

    def begin_pass(self) -> list[LayerCopy]:
        """Begin a pass; no other runs, and all that an earlier one launched has ended.

        Loads the first layers of written slots. Read-only slots have them, unless a pass broke off
        or loads failed, which are tried again now.
        """
        self.failure = None
        copies: list[LayerCopy] = []
        for buffer in self.buffers:
            if buffer.written and buffer.slot_of:
                self._must(not self.open, buffer, "an earlier pass is not finished")
                buffer.fill(())
                buffer.broken.clear()
                copies += self._refill(buffer, ())
            elif buffer.broken or buffer.lacking:
                copies += self._refill(buffer, list(buffer.broken))
        return copies

    def used(self, layer: int) -> list[LayerCopy]:
        """Note that the pass is done with a layer: its slots are stored and filled again."""
        copies: list[LayerCopy] = []
        for buffer in self.buffers:
            slot = buffer.slot_of.get(layer)
            if slot is None:
                continue
            there = layer not in buffer.absent or (self._ahead and layer in buffer.loading)
            if not there or buffer.held[slot] != layer:
                raise BrokenPromise(f"{buffer.name}: layer {layer} was not there")
            following = buffer.next_of.get(layer)
            if buffer.written:
                copies.append(self._issue(buffer, layer, slot, Direction.TO_HOST, layer))
                if following is not None and following < layer:
                    continue  # the next pass will load what it needs
            if following is not None:
                copies.append(self._fill(buffer, slot, following, layer))
        return self._startable(copies)

    # -- a copy -----------------------------------------------------------------------------------

    def landed(self, copy: LayerCopy) -> list[LayerCopy]:
        """Note the success of a copy that was submitted."""
        if not self._end(copy):
            return []
        buffer = copy.buffer
        if buffer.loading.get(copy.layer) is copy:
            del buffer.loading[copy.layer]
            buffer.absent.discard(copy.layer)
        return self._released(copy)

    def failed(self, copy: LayerCopy, why: str) -> list[LayerCopy]:
        """Note that a copy failed, or could not be submitted. Its layer fails the pass that reaches
        it; what was to overwrite content that is not stored fails with it."""
        if not self._end(copy):
            return []
        buffer = copy.buffer
        if buffer.written:
            self.failure = self.failure or why
        if buffer.loading.get(copy.layer) is copy:
            del buffer.loading[copy.layer]
            buffer.broken[copy.layer] = why
        if copy.direction is Direction.TO_DEVICE:
            return self._released(copy)
        for waiting in [c for c in self._flying.values() if copy.id in c.after]:
            self.failed(waiting, why)
        return []

    # -- inside -----------------------------------------------------------------------------------

    def _refill(self, buffer: Buffer, again: Iterable[int]) -> list[LayerCopy]:
        """Load the first layers of slots that hold others, and the layers of `again` where they
        are, in order of layers."""
        lacking = {layer: slot for slot, layer in buffer.lacking}
        copies = []
        for layer in sorted({*lacking, *again}):
            if layer in lacking:
                copies.append(self._fill(buffer, lacking[layer], layer))
            elif (slot := buffer.slot_of.get(layer, HOME)) == HOME or buffer.held[slot] == layer:
                copies.append(self._load(buffer, slot, layer))
        return self._startable(copies)

    def _fill(
        self, buffer: Buffer, slot: int, layer: int, after_use: int | None = None
    ) -> LayerCopy:
        """Load a layer into a slot in place of another's, which no pass reads after `after_use`."""
        before, last = buffer.held[slot], buffer.passing.get(slot)
        if after_use is not None and before != after_use:
            raise BrokenPromise(f"{buffer.name}: layer {before} is overwritten before its use")
        if after_use is not None and buffer.written:
            is_store = last is not None and last.direction is Direction.TO_HOST
            self._must(is_store, buffer, "content is overwritten that is not stored")
        if before != NOBODY:
            buffer.absent.add(before)
            buffer.loading.pop(before, None)
            buffer.broken.pop(before, None)
        buffer.held[slot] = layer
        return self._load(buffer, slot, layer, after_use)

    def _load(
        self, buffer: Buffer, slot: int, layer: int, after_use: int | None = None
    ) -> LayerCopy:
        buffer.absent.add(layer)
        buffer.broken.pop(layer, None)
        copy = self._issue(buffer, layer, slot, Direction.TO_DEVICE, after_use)
        buffer.loading[layer] = copy
        return copy

    def _issue(
        self,
        buffer: Buffer,
        layer: int,
        slot: int,
        direction: Direction,
        after_use: int | None = None,
    ) -> LayerCopy:
        """Make a copy that waits for the last one of its slot; a layer's use waits for its load."""
        last = buffer.passing.get(slot)
        loads = last is not None and last.direction is Direction.TO_DEVICE
        if last is None or (loads and last.layer == after_use):
            after: tuple[int, ...] = ()
        else:
            after = (last.id,)
        self._submitted += 1
        copy = LayerCopy(self._submitted, buffer, layer, slot, direction, after_use, after)
        self._flying[copy.id] = copy
        if slot != HOME:
            buffer.passing[slot] = copy
        return copy

    def _startable(self, copies: list[LayerCopy]) -> list[LayerCopy]:
        if self._ahead or not copies:
            return copies
        return [c for c in copies if self._flying.keys().isdisjoint(c.after)]

    def _released(self, copy: LayerCopy) -> list[LayerCopy]:
        """Return the copies that waited for `copy` alone."""
        if self._ahead or not self._flying:
            return []
        return self._startable([c for c in self._flying.values() if copy.id in c.after])

    def _end(self, copy: LayerCopy) -> bool:
        if self._flying.pop(copy.id, None) is None:
            return False
        if copy.buffer.passing.get(copy.slot) is copy:
            del copy.buffer.passing[copy.slot]
        return True

    @staticmethod
    def _end_arrival(buffer: Buffer) -> None:
        """End the wait for a transfer of layers: all of it has landed, or is not wanted."""
        if buffer.arrival is not None:
            buffer.absent.difference_update(buffer.arrival.missing)
            buffer.arrival = None

    @staticmethod
    def _must(holds: bool, buffer: Buffer, what: str) -> None:
        if not holds:
            raise BrokenPromise(f"{buffer.name}: {what}")
