"""Count which cells of the KV host tier are free.

Used by `kv.host_store`, live (`host_cells`, which have memory) and in virtual time.
"""

from __future__ import annotations

from ballast.core.units import KiB, ceil_div
from ballast.memory.runs import runs_of

CELL_BYTES = 32 * KiB
"""Unit of allocation: a block of KV takes whole cells, which need not be neighbours."""
Runs = tuple[tuple[int, int], ...]
"""(first cell, cells) of neighbours, in the order in which they hold a block's bytes."""


class CellBook:
    """Which cells are free. Used ones are given back in any order."""

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.ready = n_cells
        """Cells, from the first, that can be handed out."""
        self._end = 0
        """No cell from here on was ever used."""
        self._free: list[int] = []

    @property
    def used(self) -> int:
        return self._end - len(self._free)

    @property
    def end(self) -> int:
        """Number of cells, from the first, of which each was used at some time."""
        return self._end

    def allocate(self, n_bytes: int) -> Runs | None:
        """Return cells for `n_bytes`; None if too few are free."""
        n = ceil_div(n_bytes, CELL_BYTES)
        fresh = max(0, n - len(self._free))
        if self._end + fresh > self.ready:
            return None
        cells = [self._free.pop() for _ in range(n - fresh)]
        cells += range(self._end, self._end + fresh)
        self._end += fresh
        return tuple(runs_of(sorted(cells)))

    def release(self, runs: Runs) -> None:
        for first, n in reversed(runs):
            self._free += range(first + n - 1, first - 1, -1)

    def trim(self, n_bytes: int) -> None:
        """Give the memory of free cells back, up to `n_bytes`: without memory, nothing."""

    def wipe(self, runs: Runs) -> None:
        """Overwrite what cells hold: without memory, nothing."""
