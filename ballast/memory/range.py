"""Reserve a range of virtual addresses for one owner, and back it with pages of the pool.

Used by KV caches, weights and rotation slots. Addresses never move; pages come and go beneath them.
All or none of the indices of a call are backed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import MiB, ceil_div
from ballast.memory.pool import Pool
from ballast.memory.range_indices import EMPTY, HOST, LEAVING, RangeIndices
from ballast.memory.vm import Fence, Vm

_PREFAULT_BYTES = 4 * MiB
"""Most bytes backed by one call that are prefaulted at once: KV, which a job touches soon. Larger
calls back weights, filled by a link, which prefaults in its own thread beside the loop."""


class BackedRange:
    """Indices of a `range` of addresses, each backed by a page of the owner or by nothing.

    Several indices are backed all or not at all. An index can also be an *alias* of a page of
    another owner; the range's owner is then a holder of that page. Pages that the operating system
    shows mapped here are `backed + aliased + leaving`; `leaving` ones wait for a fence.
    """

    def __init__(self, pool: Pool, vm: Vm, owner: str, n_bytes: int) -> None:
        self.owner = owner
        self.backed = 0
        self.aliased = 0
        self.leaving = 0
        self.on_host = 0
        """Indices at which host memory is mapped, and no page."""
        self._pool, self._vm = pool, vm
        self.range = vm.reserve(n_bytes)
        self._indices = RangeIndices(owner, self.range.n_pages)

    @property
    def kept_pages(self) -> int:
        """Pages that are guaranteed to its owner, and that it does not have yet."""
        return self._pool.ledger.reservations.kept_for(self.owner)

    def pages(self, at: int, n: int) -> tuple[int, ...]:
        """Return the pages of `n` indices from `at`. Raises BrokenPromise if one has none."""
        return self._indices.pages(at, n)

    def is_backed(self, at: int) -> bool:
        return self._indices.within(at, 1)[0] >= 0

    def is_leaving(self, at: int) -> bool:
        """Whether the index holds a page that waits for its fence, and cannot be backed yet."""
        return self._indices.within(at, 1)[0] == LEAVING

    def back(self, at: int, n: int) -> Short | None:
        """Allocate and map `n` pages at indices `at ..`, or nothing."""
        return self.back_many(((at, n),))

    def back_many(self, where: Sequence[tuple[int, int]]) -> Short | None:
        """Allocate and map pages at all of several `(at, n)`, or nothing.

        Short also while an index still holds a page that waits for its fence. A failing map raises
        DeviceError with nothing allocated or mapped.
        """
        if leaving := self._indices.leaving(where):
            return Short(leaving)
        total = sum(n for _, n in where)
        if total == 0:
            return None
        near = self._indices.page_before(where[0][0])
        pages = self._pool.allocate(self.owner, total, near=near)
        if isinstance(pages, Short):
            return pages
        self._map_all(where, pages)
        return None

    def release(self, at: int, n: int, fence: Fence | None = None) -> None:
        """Unmap `n` indices and free their pages, once `fence` is done (`Pool.reap`)."""
        pages = self.pages(at, n)
        if not n:
            return
        self._indices.mark(at, n, LEAVING)
        self.backed -= n
        self.leaving += n
        try:
            self._pool.give_back(self.owner, pages, fence, lambda: self._leave(at, n))
        except BrokenPromise:
            self._indices.put(at, pages)
            self.backed += n
            self.leaving -= n
            raise

    def alias(self, at: int, pages: Sequence[int], owner: str) -> None:
        """Map populated pages of another owner at indices `at ..` as well.

        Raises BrokenPromise if part of that is backed; a failing map (DeviceError) changes nothing.
        """
        self._indices.check_empty(at, len(pages))
        self._pool.add_holder(owner, pages, self.owner)
        try:
            self._vm.map(self.range, at, pages, alias=True)
        except DeviceError:
            self._pool.remove_holder(owner, pages, self.owner)
            raise
        self._indices.put(at, pages)
        self.aliased += len(pages)

    def unalias(self, at: int, n: int, owner: str) -> None:
        """Unmap `n` aliases of pages that `owner` owns. Nothing in flight may use them here."""
        pages = self.pages(at, n)
        self._pool.remove_holder(owner, pages, self.owner)
        try:
            self._vm.unmap(self.range, at, n)
        except DeviceError:
            self._pool.add_holder(owner, pages, self.owner)
            raise
        self._indices.mark(at, n, EMPTY)
        self.aliased -= n

    def map_host(self, at: int, source: int, n_bytes: int) -> None:
        """Map host memory at indices `at ..`, read only: no page is used (`Vm.map_host`).

        Raises BrokenPromise if part of that is backed; a failing map (DeviceError) changes nothing.
        """
        n = ceil_div(n_bytes, self.range.page_bytes)
        self._indices.check_empty(at, n)
        self._vm.map_host(self.range, at, source, n_bytes)
        self._indices.mark(at, n, HOST)
        self.on_host += n

    def unmap_host(self, at: int, source: int, n_bytes: int) -> None:
        """Unmap host memory that was mapped with these arguments. Nothing in flight may read it."""
        n = ceil_div(n_bytes, self.range.page_bytes)
        if self._indices.within(at, n).count(HOST) != n:
            raise BrokenPromise(f"{self.owner}: no host memory at {at} .. {at + n}")
        self._vm.unmap_host(self.range, at, source, n_bytes)
        self._indices.mark(at, n, EMPTY)
        self.on_host -= n

    def cede(self, at: int, n: int, owner: str) -> tuple[int, ...]:
        """Give the pages at `at ..` to another owner and keep them mapped as aliases; returns them.
        Nothing that runs is disturbed."""
        pages = self.pages(at, n)
        self._pool.hand_over(self.owner, owner, pages)
        self._pool.add_holder(owner, pages, self.owner)
        self.backed -= n
        self.aliased += n
        return pages

    def take_over(self, at: int, pages: Sequence[int], owner: str) -> None:
        """Make pages of another owner, without holders, this one's, mapped at indices `at ..`;
        contents are kept. A failing map (DeviceError) changes nothing."""
        self._indices.check_empty(at, len(pages))
        self._pool.hand_over(owner, self.owner, pages)
        try:
            self._vm.map(self.range, at, pages)
        except DeviceError:
            self._pool.hand_over(self.owner, owner, pages)
            raise
        self._indices.put(at, pages)
        self.backed += len(pages)

    def close(self, fence: Fence | None = None) -> None:
        """Release everything; the addresses go once the last page has left. Aliases are gone."""
        if self._indices.closed:
            return
        for at, n in self._indices.stretches():
            self.release(at, n, fence)
        self._indices.closed = True
        self._release_addresses()

    def os_backed(self) -> int:
        """Pages the operating system shows mapped here; equals `backed + aliased + leaving`."""
        return (
            0 if self._indices.closed and not self.leaving else len(self._vm.os_pages(self.range))
        )

    def validate(self) -> None:
        """Raises BrokenPromise unless every page here is the owner's or lent to it, as counted."""
        here = self._indices.all_pages()
        others = [page for page in here if self._pool.ledger.owner_of(page) != self.owner]
        marked = (self._indices.count(LEAVING), self._indices.count(HOST))
        counts = (len(here) - len(others), len(others), *marked)
        if counts != (self.backed, self.aliased, self.leaving, self.on_host):
            raise BrokenPromise(f"{self.owner}: slots say {counts}")
        for page in others:
            if self.owner not in self._pool.ledger.holders.of(page):
                raise BrokenPromise(
                    f"{self.owner}: page {page} is {self._pool.ledger.owner_of(page)}'s"
                )

    def _map_all(self, where: Sequence[tuple[int, int]], pages: tuple[int, ...]) -> None:
        done: list[tuple[int, int]] = []
        start = 0
        prefault = len(pages) * self.range.page_bytes <= _PREFAULT_BYTES
        try:
            for at, n in where:
                self._vm.map(self.range, at, pages[start : start + n], prefault=prefault)
                done.append((at, n))
                start += n
        except DeviceError:
            for at, n in done:
                self._vm.unmap(self.range, at, n)
            self._pool.give_back(self.owner, pages)
            raise
        start = 0
        for at, n in where:
            self._indices.put(at, pages[start : start + n])
            start += n
        self.backed += len(pages)

    def _leave(self, at: int, n: int) -> None:
        self._vm.unmap(self.range, at, n)
        self._indices.mark(at, n, EMPTY)
        self.leaving -= n
        self._release_addresses()

    def _release_addresses(self) -> None:
        if self._indices.closed and not self.leaving:
            self._vm.release(self.range)
