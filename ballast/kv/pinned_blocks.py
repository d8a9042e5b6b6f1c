"""Page-lock the host memory of staged blocks where a GPU copies from and to it.

Used by live GPUs in place of `HostBlocks`. Memory is page-locked on first use, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ballast.core.link import Direction
from ballast.core.units import MiB
from ballast.kv.blocks import KvCache
from ballast.kv.host_blocks import HostBlocks
from ballast.memory.copies import Copy
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.residency.buffer import LayerCopy

PIECE = 2 * MiB
"""Bytes that are page-locked at a time."""


class PinnedBlocks(HostBlocks):
    """A `HostBlocks` in memory that the GPU's driver has page-locked."""

    def __init__(self, kv: KvCache, pins: PinnedMemory) -> None:
        super().__init__(kv)
        self._pins = pins
        self._pieces: set[int] = set()
        """Pieces that `pins` was asked to page-lock."""

    def copies_of(self, copy: LayerCopy) -> list[Copy]:
        loads = copy.direction is Direction.TO_DEVICE
        return list(self._cut(super().copies_of(copy), loads=loads))

    def clear(self) -> None:
        self.unpin()
        super().clear()

    def unpin(self) -> None:
        """Unlock the memory. No copy may be in flight."""
        for piece in self._pieces:
            self._pins.unpin(self.base + piece * PIECE)
        self._pieces.clear()

    def _cut(self, copies: Iterable[Copy], *, loads: bool) -> Iterator[Copy]:
        """Split copies where pieces end: the driver refuses to copy partly page-locked memory."""
        for copy in copies:
            done = 0
            while done < copy.n_bytes:
                at = (copy.src if loads else copy.dst) + done - self.base
                n = min(copy.n_bytes - done, PIECE - at % PIECE)
                self._pin(at // PIECE)
                yield Copy(copy.dst + done, copy.src + done, n)
                done += n

    def _pin(self, piece: int) -> None:
        if piece not in self._pieces:
            self._pieces.add(piece)
            self._pins.pin(self.base + piece * PIECE, PIECE, read_only=False)
