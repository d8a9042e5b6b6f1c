"""Which layers of a model share slots, so that it gives up the memory of the others (MIRAGE, 5.4).

The layers of a decoder are run in a circle: after the last of one token comes the first of the
next. Of `n` layers, `m = alpha + beta` *rotate* through `beta` *slots*, each as large as a layer:
every one is brought to its slot before it is needed, in the place of the one used there before it.
The memory of `alpha` layers is free for something else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotating layers and their slots: the i-th of `layers` has slot `i % slots`."""

    layers: tuple[int, ...] = ()
    """Ascending, counted from 0; more than `slots`, or none."""
    slots: int = 0
    """beta; 0 where nothing rotates."""

    @property
    def lent(self) -> int:
        """Layers whose memory is given up: alpha."""
        return len(self.layers) - self.slots

    def of_slot(self, slot: int) -> tuple[int, ...]:
        """Layers that share a slot, in the order they are run."""
        return self.layers[slot :: self.slots]


WHOLE = Rotation()
"""Every layer has memory of its own."""
