"""Page-lock the host copy of swapped KV where a GPU copies from and to it.

Used by live GPUs in place of `Spilled`. Planes are page-locked on first use, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ballast.kv.blocks import KvCache
from ballast.kv.spilled import Piece, Spilled
from ballast.memory.cuda.pinning import PinnedMemory


class PinnedSpill(Spilled):
    """A `Spilled` in memory that the GPU's driver has page-locked."""

    def __init__(self, kv: KvCache, dirty: bool, pins: PinnedMemory) -> None:
        super().__init__(kv, dirty)
        self._pins = pins
        self._planes: set[tuple[int, int]] = set()
        """(layer, slab) of planes that `pins` was asked to page-lock."""

    def clear(self) -> None:
        self.unpin()
        super().clear()

    def unpin(self) -> None:
        """Unlock the memory. No copy may be in flight."""
        for layer, plane in self._planes:
            self._pins.unpin(self._address(layer, plane))
        self._planes.clear()

    def _cut(self, layer: int, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Split pieces at plane boundaries: the driver refuses to copy partly page-locked
        memory."""
        size = self.layout.plane_bytes
        for at, n_bytes in pieces:
            end = at + n_bytes
            while at < end:
                self._pin(layer, at // size)
                upto = min(end, (at // size + 1) * size)
                yield at, upto - at
                at = upto

    def _pin(self, layer: int, plane: int) -> None:
        if (layer, plane) not in self._planes:
            self._planes.add((layer, plane))
            address = self._address(layer, plane)
            self._pins.pin(address, self.layout.plane_bytes, read_only=False)

    def _address(self, layer: int, plane: int) -> int:
        """Return the host address of a layer's part of a slab."""
        return self.host_address(layer, plane * self.layout.plane_bytes)
