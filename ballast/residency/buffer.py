"""Hold the slots of one kind of a model's content, and name the copies that pass through them.

::

    Rotation((0, 2, 4, 6), 2)       slot 0:  0 -> 4 -> 0 -> ...      layers 1, 3, 5 have places
                                    slot 1:  2 -> 6 -> 2 -> ...      of their own (`HOME`)

`LayerStream` alone changes a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.residency.arrival import Arrival

NOBODY = -1
"""In place of a layer's number: the slot holds no layer's bytes."""
HOME = -1
"""In place of a slot's number: the layer has a place of its own."""


@dataclass(slots=True, eq=False)
class LayerCopy:
    """A copy of one layer's part of a buffer's content, between its slot or home and the host.

    Never changed; not frozen, since a pass makes many.
    """

    id: int
    """Unique in its stream, ascending in the order of submission."""
    buffer: Buffer
    layer: int
    slot: int
    """The slot that it fills or stores; `HOME`: the layer has a place of its own."""
    direction: Direction
    after_use: int | None
    """The layer whose use by the present pass must have ended; None: the copy waits for none."""
    after: tuple[int, ...]
    """Ids of copies that must have ended before it begins."""


class Buffer:
    """Slots through which one kind of content of a model's layers passes, in a fixed order.

    *Read only* (weights): content never changes, and the slots carry over to the next pass: when a
    pass has used a slot's last layer, the first one is loaded for the pass to come (MIRAGE, 4.1).

    *Written* (KV): a pass changes it, so that a layer is stored before its slot is filled again.
    Loads and stores belong to one pass: the batch decides what they contain.
    """

    def __init__(self, name: str, *, written: bool) -> None:
        self.name, self.written = name, written
        self.loading: dict[int, LayerCopy] = {}
        """By layer, the load in flight that makes it present."""
        self.passing: dict[int, LayerCopy] = {}
        """By slot, the last copy in flight from or to it."""
        self.broken: dict[int, str] = {}
        """Layers whose load failed, and why; the next pass tries again."""
        self.arrival: Arrival | None = None
        """The transfer under way that brings layers home; None: none, or all have landed."""
        self.lay(WHOLE, ())

    def lay(self, rotation: Rotation, held: Sequence[int]) -> None:
        """Put `rotation` in force; `held`: by slot, the layer whose bytes are there."""
        self.rotation = rotation
        self.slot_of = rotation.slot_of
        """Slot of each rotating layer."""
        self.next_of = {a: b for a, b in sorted(rotation.next_of.items()) if a != b}
        """By layer that shares its slot, ascending: the next layer in that slot."""
        self.first = rotation.first
        """By slot, the layer with which a pass begins."""
        self._stops = frozenset(self.slot_of if self.written else self.next_of)
        self._ordered = tuple(sorted(self._stops))
        self.fill(held)

    def fill(self, held: Sequence[int]) -> None:
        """Set what the slots hold, each of them a layer whose bytes are there, or `NOBODY`."""
        self.held = list(held) or [NOBODY] * self.rotation.slots
        """By slot, the layer whose bytes are there or in flight."""
        self.absent = self.slot_of.keys() - set(self.held)
        """Layers whose bytes are not where a pass reads them."""

    @property
    def lacking(self) -> list[tuple[int, int]]:
        """(slot, layer) of slots that do not hold the layer with which a pass begins."""
        return [(slot, layer) for slot, layer in enumerate(self.first) if self.held[slot] != layer]

    @property
    def stops(self) -> Sequence[int]:
        """Layers, ascending, before which a pass may wait or after which copies follow."""
        if self.absent <= self._stops:
            return self._ordered
        return sorted(self._stops | self.absent)

    @property
    def held_now(self) -> tuple[int, ...]:
        """By slot, the layer whose bytes have landed there, or `NOBODY`."""
        return tuple(NOBODY if layer in self.absent else layer for layer in self.held)

    def awaits_copy(self, layer: int) -> bool:
        """Whether a layer is absent and a copy of the stream, not an arrival, is to bring it."""
        arriving = self.arrival is not None and layer in self.arrival.missing
        return layer in self.absent and not arriving

    def fault(self, layer: int) -> str | None:
        """Return why a layer will not become present in this pass; None: it may."""
        if self.arrival is not None and layer in self.arrival.missing:
            return self.arrival.error
        return self.broken.get(layer)
