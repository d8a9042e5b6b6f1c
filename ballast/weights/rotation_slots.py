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

    A pass begins with the first layers of the rotation; once it is done with a layer, the next one
    of its slot takes its place, and at its end those that the next pass begins with are back. Knows
    nothing of copies, and has no lock: its rotor has both.
    """

    def __init__(self) -> None:
        self.remap(WHOLE, ())

    def remap(self, rotation: Rotation, held: Sequence[int]) -> None:
        """Put `rotation` in force; `held`: by slot, the layer that it holds, or `NOBODY`."""
        self.rotation = rotation
        self.held = list(held)
        """By slot, the layer whose bytes are there or on their way."""
        self.slot_of = rotation.slot_of
        """By rotating layer."""
        self.next_of = {a: b for a, b in sorted(rotation.next_of.items()) if a != b}
        """By layer that shares its slot, ascending: the one that follows it there."""

    def lacking(self) -> list[tuple[int, int]]:
        """Slots that do not hold the layer that a pass begins with, each with that layer."""
        first = self.rotation.layers[: self.rotation.slots]
        return [(slot, layer) for slot, layer in enumerate(first) if self.held[slot] != layer]

    def following(self, layer: int) -> tuple[int, int] | None:
        """Return the slot of a layer that a pass is done with, and the layer that takes its place;
        None if it stays."""
        following = self.next_of.get(layer)
        return None if following is None else (self.slot_of[layer], following)

    def put(self, slot: int, layer: int) -> int:
        """Give the slot to a layer; returns the one that it held, or `NOBODY`."""
        before = self.held[slot]
        self.held[slot] = layer
        return before
