"""Lay out a KV cache layer by layer, and back it so that rotating layers share pages.

Used instead of the block-major `layout` and `backing` where the preset swaps KV of rotating layers.

A slab's blocks have one stretch of whole pages, its *plane*, in each layer's part of the range::

    layer 0  | slab 0 | slab 1 | ... |          a layer's planes lie side by side
    layer 1  | slab 0 | slab 1 | ... |
    layer 2  | slab 0 | slab 1 | ... |          1 and 2 rotate through one slot: there their
    slot 0   | slab 0 | slab 1 | ... |          planes are aliases of the slot's

Which layers rotate changes between jobs only. Between jobs the KV of rotating layers is on the host
and a slot's contents are undefined. Nothing is copied here: a `KvSwapper` moves the KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.kv.backing import RangeBacking
from ballast.kv.layout import Layout, choose
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm import Vm

MORE_SLABS = 4
"""Slabs with reserved addresses, as a multiple of the slabs that fit the pool without rotation."""


@dataclass(frozen=True, slots=True)
class LayeredLayout(Layout):
    """Layer-major layout. `slab_pages`: pages of a slab under the current rotation, each slot
    counted once."""

    plane_pages: int = 1
    most_slabs: int = 1

    @classmethod
    def over(cls, spec: ModelSpec, page_bytes: int, pages: int) -> LayeredLayout:
        """Return the layout of `spec` for a pool of `pages` pages."""
        shape = (spec.n_layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
        plane, blocks = choose(spec.block_bytes // spec.n_layers, page_bytes)
        whole = plane * spec.n_layers
        most = max(1, MORE_SLABS * pages // whole)
        return cls(shape, spec.block_bytes, page_bytes, whole, blocks, plane, most)

    @property
    def whole_pages(self) -> int:
        return self.shape[0] * self.plane_pages

    @property
    def plane_bytes(self) -> int:
        return self.plane_pages * self.page_bytes

    @property
    def slab_bytes(self) -> int:
        return self.plane_bytes

    @property
    def range_bytes(self) -> int:
        return self.shape[0] * self.plane_bytes

    @property
    def layer_stride_bytes(self) -> int:
        return self.most_slabs * self.plane_bytes

    def rotating(self, rotation: Rotation) -> LayeredLayout:
        """Return this layout with `slab_pages` under `rotation`."""
        return replace(self, slab_pages=(self.shape[0] - rotation.n_freed) * self.plane_pages)


class LayeredBacking(RangeBacking):
    """Backs slabs of planes. The owner of the slots' pages in the pool is ``kvslots:NAME``."""

    layout: LayeredLayout

    def __init__(self, model: str, layout: LayeredLayout, pool: Pool, vm: Vm) -> None:
        super().__init__(f"kv:{model}", layout, pool, vm, layout.most_slabs)
        self.rotation = WHOLE
        """Rotation in force."""
        self._slot_owner = f"kvslots:{model}"
        self._vm = vm
        self._slots: list[BackedRange] = []

    def release(self, indices: Iterable[int]) -> int:
        ordered = sorted(indices)
        for at, n in self._planes(ordered):
            for layer in self._own:
                self.range.release(self._at(layer, at), n)
            for layer in self.rotation.layers:
                self.range.unalias(self._at(layer, at), n, self._slot_owner)
            for slot in self._slots:
                slot.release(at, n)
        self.pages -= len(ordered) * self.layout.slab_pages
        self._vacate(ordered)
        return len(ordered) * self.layout.slab_pages

    def turn(self, wanted: Rotation, backed: Iterable[int]) -> bool:
        """Change which layers rotate; `backed`: all slabs that are backed. No job may be running.

        Contents of slots, and of layers that rotate no more, are undefined afterwards. Returns
        False, without a change, if the pool is short. Raises DeviceError, with slabs lost, if the
        operating system refuses to map.
        """
        slabs = sorted(backed)
        more = (self.rotation.n_freed - wanted.n_freed) * self.layout.plane_pages * len(slabs)
        if more > self._pool.available(self.owner):
            return False
        runs = self._planes(slabs)
        before, after = set(self.rotation.layers), set(wanted.layers)
        for at, n in runs:
            for layer in self.rotation.layers:
                self.range.unalias(self._at(layer, at), n, self._slot_owner)
            for slot in self._slots[wanted.slots :]:
                slot.release(at, n)
            for layer in after - before:
                self.range.release(self._at(layer, at), n)
        for slot in self._slots[wanted.slots :]:
            slot.close()
        del self._slots[wanted.slots :]
        fresh = [self._new_slot() for _ in range(wanted.slots - len(self._slots))]
        self._slots += fresh
        self.rotation = wanted
        self.layout = self.layout.rotating(wanted)
        self.pages = len(slabs) * self.layout.slab_pages
        back = [(self._at(layer, at), n) for layer in sorted(before - after) for at, n in runs]
        short = self.range.back_many(back)
        slots = len(fresh) * self.layout.plane_pages * len(slabs)
        # Of what is promised to the cache, slots need what is not free otherwise.
        self._promise_slots(max(0, slots - self._pool.available(self._slot_owner)))
        if any([short, *(slot.back_many(runs) for slot in fresh)]):
            raise DeviceError("map", "the machine has no memory for pages that were free")
        self._alias(runs)
        return True

    def validate(self, backed: Set[int]) -> None:
        layout, pages, slot_of = self.layout, self.layout.plane_pages, self.rotation.slot_of
        for index in backed:
            at = index * pages
            for layer in range(layout.shape[0]):
                self.range.pages(self._at(layer, at), pages)
            for layer, slot in slot_of.items():
                there = self._slots[slot].pages(at, pages)
                if self.range.pages(self._at(layer, at), pages) != there:
                    raise BrokenPromise(f"{self.owner}: layer {layer} is not in its slot")
        slots = sum(slot.backed for slot in self._slots)
        if self.pages != len(backed) * layout.slab_pages or self.pages != self.range.backed + slots:
            raise BrokenPromise(f"{self.owner}: {self.pages} pages, {self.range.backed} + {slots}")
        if self.range.aliased != len(backed) * pages * len(self.rotation.layers):
            raise BrokenPromise(f"{self.owner}: {self.range.aliased} pages of slots")
        owned = self._pool.ledger.owned(self.owner), self._pool.ledger.owned(self._slot_owner)
        if owned != (self.range.backed, slots):
            raise BrokenPromise(f"{self.owner}: the pool counts {owned}")
        self._validate_indices(backed)

    @property
    def _own(self) -> list[int]:
        """Layers with pages of their own: those that do not rotate."""
        return [i for i in range(self.layout.shape[0]) if i not in self.rotation.layers]

    def _at(self, layer: int, at: int) -> int:
        """Return the index in the range of page `at` of a layer's part."""
        return layer * self.layout.most_slabs * self.layout.plane_pages + at

    def _planes(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Return maximal runs `(page, pages)` of ascending slabs in a layer's part or a slot."""
        return self._runs(indices, self.layout.plane_pages)

    def _new_slot(self) -> BackedRange:
        n_bytes = self.layout.layer_stride_bytes
        return BackedRange(self._pool, self._vm, self._slot_owner, n_bytes)

    def _alias(self, runs: Sequence[tuple[int, int]]) -> None:
        slot_of = self.rotation.slot_of
        for at, n in runs:
            for layer, slot in slot_of.items():
                pages = self._slots[slot].pages(at, n)
                self.range.alias(self._at(layer, at), pages, self._slot_owner, prefault=True)

    def _map(self, indices: Sequence[int]) -> bool:
        runs = self._planes(indices)
        own = [(self._at(layer, at), n) for layer in self._own for at, n in runs]
        promised = self._pool.ledger.promised_to(self.owner)
        if self.range.back_many(own) is not None:
            return False
        self._promise_slots(len(self._slots) * self.layout.plane_pages * len(indices))
        done: list[BackedRange] = []
        for slot in self._slots:
            if slot.back_many(runs) is None:
                done.append(slot)
        if len(done) < len(self._slots):
            for slot in done:
                for at, n in runs:
                    slot.release(at, n)
            for at, n in own:
                self.range.release(at, n)
            self._pool.cancel_promise(self._slot_owner)
            self._pool.cancel_promise(self.owner)
            short = self._pool.promise(self.owner, promised)
            assert short is None, "as many are free as before"
            return False
        self._alias(runs)
        self.pages += len(indices) * self.layout.slab_pages
        return True

    def _promise_slots(self, pages: int) -> None:
        """Transfer up to `pages` of the cache's promised pages to the slots' owner: a slab consists
        of pages of both."""
        left = self._pool.cancel_promise(self.owner)
        for owner, n in ((self._slot_owner, min(pages, left)), (self.owner, left - pages)):
            short = self._pool.promise(owner, max(0, n))
            assert short is None, "they were promised"

    def _undo(self, indices: Sequence[int]) -> None:
        """Release slabs that were backed in part or not at all, and make them vacant again."""
        self._pool.cancel_promise(self._slot_owner)
        pages = self.layout.plane_pages
        for index in indices:
            at = index * pages
            for layer in range(self.layout.shape[0]):
                if not self.range.is_backed(self._at(layer, at)):
                    continue
                if layer in self.rotation.layers:
                    self.range.unalias(self._at(layer, at), pages, self._slot_owner)
                else:
                    self.range.release(self._at(layer, at), pages)
            for slot in self._slots:
                if slot.is_backed(at):
                    slot.release(at, pages)
        self._vacate(indices)
