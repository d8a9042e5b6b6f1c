"""Map the pages of slots beneath the rotating layers of a model, which share them in turn.

::

    weights:a    [ 7 ][ 3 ][ 9 ][ 3 ]        layers 0 .. 3; 1 and 3 rotate through one slot
    owners       pages 7, 9: weights:a        3: slots:a, aliased by weights:a twice

Which layers rotate changes between jobs only (`remap`); a job maps nothing. Layers whose slot stays
the same are not touched, so the cost of a change is that of the layers that it affects. Streams
copy layers' bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.rotation import WHOLE, Rotation
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's pages in the range of its model's weights."""

    at: int
    """First page."""
    n_pages: int
    n_bytes: int
    own: bool
    """Whether the segment is in no other model."""


@dataclass(frozen=True, slots=True)
class SlotContents:
    """Where layers' bytes are after a change of rotation."""

    held: tuple[int, ...]
    """By slot, the layer whose bytes are there, or -1."""
    missing: tuple[int, ...]
    """Layers that have memory of their own again, but no bytes."""


class Slots:
    """The slots of one model, whose owner in the ledger is ``slots:NAME``."""

    def __init__(self, model: str, pool: Pool, weights: BackedRange) -> None:
        self.owner = f"slots:{model}"
        self.rotation = WHOLE
        """The rotation in force."""
        self._pool, self._range = pool, weights
        self._layers: tuple[LayerPages, ...] = ()
        self._pages: list[tuple[int, ...]] = []
        """Pages of each slot."""
        self.rotatable: tuple[int, ...] = ()
        """Layers that may rotate: of the commonest size, and in no other model."""
        self.layer_pages = 0
        """Pages of each rotatable layer; 0 where there are fewer than two."""
        self.layer_bytes = 0
        """Bytes of the largest rotatable layer."""

    def tabulate(self, layers: Sequence[LayerPages]) -> None:
        """Set the layers' places; called again when some have become shared."""
        self._layers = tuple(layers)
        sizes = Counter(p.n_pages for p in layers if p.own)
        pages = max(sizes, key=lambda n: (sizes[n], n), default=0)
        alike = [i for i, p in enumerate(layers) if p.own and p.n_pages == pages]
        self.rotatable = tuple(alike) if len(alike) > 1 else ()
        self.layer_pages = pages if self.rotatable else 0
        self.layer_bytes = max((layers[i].n_bytes for i in self.rotatable), default=0)

    @property
    def pages(self) -> int:
        """Pages of all slots."""
        return sum(map(len, self._pages))

    def refusal(self, wanted: Rotation) -> str | None:
        """Return why these layers cannot rotate; None: they can."""
        return wanted.refusal(self.rotatable)

    def remap(self, wanted: Rotation, held: Sequence[int]) -> SlotContents | Short:
        """Change the layers that rotate; or change nothing, if the pool is short.

        `held`: by slot, the layer whose bytes are there. No job and no load of the model may be in
        flight. Raises BrokenPromise for a rotation that `refusal` would refuse.
        """
        why = self.refusal(wanted)
        if why is not None:
            raise BrokenPromise(f"{self.owner}: {why}")
        short = (self.rotation.n_freed - wanted.n_freed) * self.layer_pages
        short -= self._pool.available(self._range.owner)
        if short > 0:
            return Short(short)
        before = self.rotation.slot_of
        after = wanted.slot_of
        kept = min(self.rotation.slots, wanted.slots)
        for layer, slot in before.items():
            if slot >= kept or after.get(layer) != slot:
                self._unmap(layer, slot)
        mapped = {i for i, s in before.items() if s < kept and after.get(i) == s}
        missing = [i for i in before if i not in after]
        for slot in range(kept, self.rotation.slots):
            stays = held[slot] if held[slot] in missing else None
            self._dissolve(slot, stays)
            if stays is not None:
                missing.remove(stays)
        del self._pages[kept:]
        holding = [held[s] if after.get(held[s]) == s else -1 for s in range(kept)]
        whole = [i for i in after if i not in before]
        for slot in range(kept, wanted.slots):
            first = next((i for i in wanted.of_slot(slot) if i in whole), None)
            holding.append(-1 if first is None else first)
            if first is not None:
                whole.remove(first)
                mapped.add(first)
                at, n = self._where(first)
                self._pages.append(self._range.cede(at, n, self.owner))
            else:
                self._pages.append(())
        for layer in whole:
            self._range.release(*self._where(layer))
        for layer in missing:
            self._must(self._range.back(*self._where(layer)))
        for slot, pages in enumerate(self._pages):
            if not pages:
                self._pages[slot] = self._allocate()
        for layer, slot in after.items():
            if layer not in mapped:
                self._range.alias(self._where(layer)[0], self._pages[slot], self.owner)
        self.rotation = wanted
        return SlotContents(tuple(holding), tuple(sorted(missing)))

    def dissolve(self) -> None:
        """Free all slots, and with them the memory of rotating layers, before an eviction."""
        for layer, slot in self.rotation.slot_of.items():
            self._unmap(layer, slot)
        for slot in range(self.rotation.slots):
            self._dissolve(slot, None)
        self._pages.clear()
        self.rotation = WHOLE

    def validate(self) -> None:
        """Raise BrokenPromise unless each slot is mapped beneath its layers, and the pool
        agrees."""
        for layer, slot in self.rotation.slot_of.items():
            if self._range.pages(*self._where(layer)) != self._pages[slot]:
                raise BrokenPromise(f"{self.owner}: layer {layer} is not in slot {slot}")
        if self._pool.ledger.owned(self.owner) != self.pages:
            raise BrokenPromise(f"{self.owner}: owns {self._pool.ledger.owned(self.owner)}")

    def _where(self, layer: int) -> tuple[int, int]:
        place = self._layers[layer]
        return place.at, place.n_pages

    def _unmap(self, layer: int, slot: int) -> None:
        at, n = self._where(layer)
        self._range.unalias(at, n, self.owner)

    def _dissolve(self, slot: int, stays: int | None) -> None:
        """Give the slot's pages to layer `stays` as its own, or free them."""
        pages = self._pages[slot]
        if stays is None:
            self._pool.give_back(self.owner, pages)
        else:
            self._range.take_over(self._where(stays)[0], pages, self.owner)

    def _allocate(self) -> tuple[int, ...]:
        """Allocate a slot's pages through the weights' owner, to which they were promised."""
        pages = self._pool.allocate(self._range.owner, self.layer_pages)
        if isinstance(pages, Short):
            raise BrokenPromise(f"{self.owner}: {pages.pages} pages are gone that were free")
        self._pool.hand_over(self._range.owner, self.owner, pages)
        return pages

    def _must(self, short: Short | None) -> None:
        if short is not None:
            raise BrokenPromise(f"{self.owner}: {short.pages} pages are gone that were free")
