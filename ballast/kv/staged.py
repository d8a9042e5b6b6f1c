"""Hold the numbers of a KV cache's blocks on the host, and the device pages in which they are read.

Part of `KvCache`. In block tables, host block `h` has the number `-1 - h`: numbers below zero are
*staged* blocks. A pass reads a layer of them in a *slot*, to which its stream brings that layer's
part of each block before the layer's attention::

    page       |  page 7                    |  page 30                   |
    slot 0     | b0 | b1 | b2 |             |                            |   layers 0, 2, 4, ...
    slot 1     |              | b0 | b1 | b2|                            |   layers 1, 3, 5, ...

This is SwiftCache's layer stream cache (3.2), of as many slots as loads overlap. Slots lie on pages
of the cache anywhere in the device's window; what they hold belongs to one pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import gcd

from ballast.core.errors import BrokenPromise
from ballast.core.rotation import Rotation
from ballast.core.units import ceil_div
from ballast.kv.layout import Layout

SLOTS = 2
"""Slots by default: one is read while the next layer is loaded. The paper has one."""


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Blocks that the next job copies beside its work, layer by layer; pairs of block numbers.

    Both copies are whole when the job has ended; the source stays what tables name until then.
    """

    stores: tuple[tuple[int, int], ...] = ()
    """(device block, staged block)."""
    homes: tuple[tuple[int, int], ...] = ()
    """(staged block, device block): the pass reads it there."""

    def __bool__(self) -> bool:
        return bool(self.stores or self.homes)

    @property
    def coming(self) -> list[int]:
        """Device blocks to which staged ones are brought. Each has one reference, in no table."""
        return [block for _, block in self.homes]


class StagedBlocks:
    """Numbers of the staged blocks of one cache, and the pages of its slots."""

    def __init__(self, layout: Layout, most: int, window_bytes: int) -> None:
        """`most`: bound on staged blocks. None can be staged of blocks larger than a page, of a
        model of one layer, or where block tables in `unit`s do not reach all of the window."""
        self.layout = layout
        self.unit = gcd(layout.stride_bytes, layout.layer_bytes, layout.page_bytes)
        """Bytes that divide all places of a layer's part of a block."""
        fits = layout.slab_pages == 1 and window_bytes // self.unit <= 1 << 31
        self.most = most if fits and layout.shape[0] > 1 else 0
        self.slots = min(SLOTS, max(1, layout.shape[0] - 1))
        """Layers that have room in the slots at a time."""
        self.pages: Sequence[int] = ()
        """Pages of the slots, by number in the device's window."""
        self.blocks: set[int] = set()
        """Numbers in use, all below zero."""
        self._vacant: list[int] = []
        self._end = 0
        self._per_page = max(1, layout.page_bytes // layout.layer_bytes)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def room(self) -> int:
        """Number of blocks that can still be staged."""
        return self.most - len(self.blocks)

    def allocate(self, n: int) -> list[int]:
        """Take `n` numbers, which must be within `room`; the lowest host blocks first."""
        hosts = [heapq.heappop(self._vacant) for _ in range(min(n, len(self._vacant)))]
        hosts += range(self._end, self._end + n - len(hosts))
        self._end = max([self._end, *(host + 1 for host in hosts)])
        numbers = [-1 - h for h in hosts]
        self.blocks.update(numbers)
        return numbers

    def free(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.blocks.remove(number)
            heapq.heappush(self._vacant, -1 - number)

    # -- slots ------------------------------------------------------------------------------------

    def pages_for(self, n_blocks: int) -> int:
        """Return the pages of slots in which passes can read `n_blocks` staged blocks."""
        return ceil_div(self.slots * n_blocks, self._per_page)

    def blocks_in(self, pages: int) -> int:
        """Return the staged blocks that passes can read in slots of `pages` pages."""
        return pages * self._per_page // self.slots

    @property
    def rotation(self) -> Rotation:
        """Rotation of a pass's KV: all layers pass through the slots in turn."""
        return Rotation(tuple(range(self.layout.shape[0])), self.slots)

    def offset(self, slot: int, index: int, n_blocks: int) -> int:
        """Return the offset in the window of the part of staged block `index`, of a pass that reads
        `n_blocks` of them."""
        at = slot * n_blocks + index
        page = self.pages[at // self._per_page]
        return page * self.layout.page_bytes + at % self._per_page * self.layout.layer_bytes

    def validate(self, pages: Sequence[int], coming: int) -> None:
        """Raises BrokenPromise unless the slots, on `pages`, have room for all staged blocks but
        those `coming` with the job in flight."""
        n = len(self.blocks) - coming
        if list(self.pages) != list(pages) or len(pages) < self.pages_for(n):
            raise BrokenPromise(f"{n} staged blocks, slots of {self.pages}")


def staged_of(tables: Collection[Sequence[int]]) -> list[int]:
    """Return the staged blocks of some tables, each once, in the order in which slots have them."""
    return sorted({b for table in tables for b in table if b < 0}, reverse=True)
