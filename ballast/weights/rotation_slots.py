"""Track which layer each slot of a rotation holds, and which layer follows it there.

Used by the rotors, live (`LinkRotor`, `EventRotor`) and simulated; copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.rotation import WHOLE, Rotation

NOBODY = -1
"""In place of a layer's number: the slot holds no layer's bytes."""


class RotationSlots:
    """The slots of one model, of which a rotor fills each with one layer after the other.

    A pass begins with the first layers of the rotation. Once it has used a layer, the next layer of
    its slot takes its place; at the end of the pass, the slots hold the layers that the next pass
    begins with. Makes no copies and has no lock: its rotor does both.
    """

    def __init__(self) -> None:
        self.remap(WHOLE, ())

    def remap(self, rotation: Rotation, held: Sequence[int]) -> None:
        """Put `rotation` in force; `held`: by slot, the layer that it holds, or `NOBODY`."""
        self.rotation = rotation
        self.held = list(held)
        """By slot, the layer whose bytes are there or in flight."""
        self.slot_of = rotation.slot_of
        """Slot of each rotating layer."""
        self.next_of = {a: b for a, b in sorted(rotation.next_of.items()) if a != b}
        """By layer that shares its slot, ascending: the next layer in that slot."""

    def lacking(self) -> list[tuple[int, int]]:
        """Return the slots that do not hold the layer that a pass begins with, each with that
        layer."""
        first = enumerate(self.rotation.first)
        return [(slot, layer) for slot, layer in first if self.held[slot] != layer]

    def following(self, layer: int) -> tuple[int, int] | None:
        """Return the slot of a layer that a pass has used, and the layer that takes its place; None
        if it stays."""
        following = self.next_of.get(layer)
        return None if following is None else (self.slot_of[layer], following)

    def put(self, slot: int, layer: int) -> int:
        """Assign the slot to a layer; returns the one that it held, or `NOBODY`."""
        before = self.held[slot]
        self.held[slot] = layer
        return before
