"""Copy segments that passes read in host memory to pages, beside these passes.

Used by `WeightsOnDevice`. While the link copies, to pages as they lie in the device's window,
passes go on reading host memory; between two passes, `place` maps the pages beneath the segments::

    weights:a     [ host ][ host ][  7 ]         passes read here
    promoted:a    [  3   ][  4   ]               the link writes here, through the window
    weights:a     [  3   ][  4   ][  7 ]         after `place`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.copies import Copy
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.runs import runs_of
from ballast.memory.transfer import Link
from ballast.weights.segment_table import PlacedSegment


class Promotion:
    """Segments of one model on their way to pages. Their owner in the ledger is
    ``promoted:NAME``."""

    def __init__(self, model: str, pool: Pool, weights: BackedRange, link: Link) -> None:
        self.owner = f"promoted:{model}"
        self._pool, self._range, self._link = pool, weights, link
        self._pages: dict[int, tuple[int, ...]] = {}
        """Pages by segment; none of a shared segment that another model has brought."""
        self.transfer_id: int | None = None
        """The transfer that brings them; None: all have landed, or there are none."""
        self.cancelled = False
        """Whether the pages are freed as soon as the transfer has ended."""

    @property
    def segments(self) -> frozenset[int]:
        """Segments that are on their way, or have landed and not been placed."""
        return frozenset(self._pages)

    @property
    def awaited(self) -> bool:
        """Whether the end of a transfer will come."""
        return self.transfer_id is not None

    @property
    def pages(self) -> int:
        """Pages that they take so far."""
        return sum(map(len, self._pages.values()))

    def begin(
        self, transfer_id: int, segments: Sequence[PlacedSegment], wanted: Collection[int]
    ) -> Short | None:
        """Allocate pages for the segments `wanted`, and start the transfer that fills them; or do
        nothing. Raises DeviceError if the link fails.

        No transfer is needed, and none starts, if other models have brought all of them.
        """
        if self._pages:
            raise BrokenPromise(f"{self.owner}: segments are on their way already")
        numbers = {i: segments[i].n_pages for i in sorted(wanted) if not _brought(segments[i])}
        allocated = self._pool.allocate(self.owner, sum(numbers.values()))
        if isinstance(allocated, Short):
            return allocated
        left = iter(allocated)
        own = {i: tuple(next(left) for _ in range(n)) for i, n in numbers.items()}
        self._pages = {i: own.get(i, ()) for i in wanted}
        if own:
            copies = [c for i, pages in own.items() for c in self._copies(segments[i], pages)]
            try:
                self._link.start(transfer_id, copies)
            except DeviceError:
                self._drop()
                raise
            self.transfer_id = transfer_id
        return None

    def ended(self, error: str | None) -> bool:
        """Handle the end of the transfer; return whether the segments can be placed."""
        self.transfer_id = None
        if error is not None or self.cancelled:
            self._drop()
        return bool(self._pages)

    def cancel(self) -> None:
        """Free the pages, at once or when the transfer has ended, which is stopped."""
        if self.transfer_id is None:
            self._drop()
        elif not self.cancelled:
            self.cancelled = True
            self._link.stop(self.transfer_id)

    def place(self, segments: Sequence[PlacedSegment], wanted: Collection[int]) -> frozenset[int]:
        """Map what has landed of `wanted` in place of host memory; return the segments that have
        pages now. The others stay in place: shared ones that another model still brings."""
        if self.transfer_id is not None:
            return frozenset()
        landed, self._pages = self._pages, {}
        placed = [i for i, n in landed.items() if i in wanted and self._place(segments[i], n)]
        left = [page for i in landed.keys() - frozenset(wanted) for page in landed[i]]
        self._pool.give_back(self.owner, left)
        return frozenset(placed)

    def validate(self) -> None:
        """Raise BrokenPromise unless the ledger has these pages and no more."""
        if self._pool.ledger.owned(self.owner) != self.pages:
            raise BrokenPromise(f"{self.owner}: owns {self._pool.ledger.owned(self.owner)}")
        if self.cancelled and self.transfer_id is None:
            raise BrokenPromise(f"{self.owner}: cancelled, and nothing is in flight")

    def _place(self, s: PlacedSegment, pages: tuple[int, ...]) -> bool:
        """Map one segment's pages; return False, with the pages freed, if that is impossible."""
        shared = s.shared
        if shared is not None and pages and not shared.pages:
            shared.adopt(self.owner, pages)
        elif shared is not None:
            self._pool.give_back(self.owner, pages)
            if not shared.filled:
                return False
        self._range.unmap_host(s.at, s.host_address, s.n_bytes)
        try:
            if shared is None:
                self._range.take_over(s.at, pages, self.owner)
            else:
                self._range.alias(s.at, shared.pages, shared.owner)
        except DeviceError:
            self._range.map_host(s.at, s.host_address, s.n_bytes)
            if shared is None:
                self._pool.give_back(self.owner, pages)
            elif not shared.holders:
                shared.free()
            return False
        return True

    def _copies(self, s: PlacedSegment, pages: tuple[int, ...]) -> Iterator[Copy]:
        """Yield the copies of a segment, one for each run of neighbouring pages."""
        window, size, source = self._pool.vm.window, self._range.range.page_bytes, s.host_address
        end = s.host_address + s.n_bytes
        for first, n in runs_of(pages):
            n_bytes = min(n * size, end - source)
            yield Copy(window.address(first), source, n_bytes)
            source += n_bytes

    def _drop(self) -> None:
        """Free what has not been placed."""
        left = [page for pages in self._pages.values() for page in pages]
        self._pages, self.cancelled = {}, False
        self._pool.give_back(self.owner, left)


def _brought(s: PlacedSegment) -> bool:
    """Whether the device has a shared segment already, or another model brings it."""
    return s.shared is not None and bool(s.shared.pages)
