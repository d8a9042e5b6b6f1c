"""Reserve a range of virtual addresses for one owner, and back it with pages of the pool.

Used by KV caches, weights and rotation slots. Addresses never move; pages come and go beneath them.
All or none of the indices of a call are backed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import MiB, ceil_div
from ballast.memory.pool import Pool
from ballast.memory.vm import Fence, Range, Vm

_EMPTY = -1
_LEAVING = -2
"""Index that is still mapped while its page is reclaiming: new work must not use it, and it cannot
be backed again yet."""
_HOST = -3
"""Index at which host memory is mapped."""


_PREFAULT_BYTES = 4 * MiB
"""Most bytes backed by one call that are prefaulted at once: KV, which a job touches soon. Larger
calls back weights, filled by a link, which prefaults in its own thread beside the loop."""


class BackedRange:
    """`n_pages` indices from address `base`, each backed by a page of the owner or by nothing.

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
        self._range = vm.reserve(n_bytes)
        self._slots = array("i", [_EMPTY]) * self._range.n_pages
        self._closed = False

    @property
    def base(self) -> int:
        """Address of index 0; never changes."""
        return self._range.base

    @property
    def n_pages(self) -> int:
        return self._range.n_pages

    @property
    def page_bytes(self) -> int:
        return self._range.page_bytes

    @property
    def kept_pages(self) -> int:
        """Pages that are guaranteed to its owner, and that it does not have yet."""
        return self._pool.ledger.reservations.kept_for(self.owner)

    @property
    def range(self) -> Range:
        return self._range

    def address(self, at: int) -> int:
        return self._range.address(at)

    def pages(self, at: int, n: int) -> tuple[int, ...]:
        """Return the pages of `n` indices from `at`. Raises BrokenPromise if one has none."""
        pages = tuple(self._within(at, n))
        if pages and min(pages) < 0:
            raise BrokenPromise(f"{self.owner}: not all of {at} .. {at + n} is backed")
        return pages

    def is_backed(self, at: int) -> bool:
        return self._within(at, 1)[0] >= 0

    def is_leaving(self, at: int) -> bool:
        """Whether the index holds a page that waits for its fence, and cannot be backed yet."""
        return self._within(at, 1)[0] == _LEAVING

    def back(self, at: int, n: int) -> Short | None:
        """Allocate and map `n` pages at indices `at ..`, or nothing."""
        return self.back_many(((at, n),))

    def back_many(self, where: Sequence[tuple[int, int]]) -> Short | None:
        """Allocate and map pages at all of several `(at, n)`, or nothing.

        Short also while an index still holds a page that waits for its fence. A failing map raises
        DeviceError with nothing allocated or mapped.
        """
        leaving = self._check_empty(where)
        if leaving:
            return Short(leaving)
        total = sum(n for _, n in where)
        if total == 0:
            return None
        first = where[0][0]
        near = self._slots[first - 1] if first else _EMPTY
        pages = self._pool.allocate(self.owner, total, near=near if near >= 0 else None)
        if isinstance(pages, Short):
            return pages
        self._map_all(where, pages)
        return None

    def release(self, at: int, n: int, fence: Fence | None = None) -> None:
        """Unmap `n` indices and free their pages, once `fence` is done (`Pool.reap`)."""
        pages = self.pages(at, n)
        if not n:
            return
        self._slots[at : at + n] = array("i", [_LEAVING]) * n
        self.backed -= n
        self.leaving += n
        try:
            self._pool.give_back(self.owner, pages, fence, lambda: self._leave(at, n))
        except BrokenPromise:
            self._slots[at : at + n] = array("i", pages)
            self.backed += n
            self.leaving -= n
            raise

    def alias(self, at: int, pages: Sequence[int], owner: str) -> None:
        """Map populated pages of another owner at indices `at ..` as well.

        Raises BrokenPromise if part of that is backed; a failing map (DeviceError) changes nothing.
        """
        if self._check_empty(((at, len(pages)),)):
            raise BrokenPromise(f"{self.owner}: pages at {at} .. are still leaving")
        self._pool.add_holder(owner, pages, self.owner)
        try:
            self._vm.map(self._range, at, pages, alias=True)
        except DeviceError:
            self._pool.remove_holder(owner, pages, self.owner)
            raise
        self._slots[at : at + len(pages)] = array("i", pages)
        self.aliased += len(pages)

    def unalias(self, at: int, n: int, owner: str) -> None:
        """Unmap `n` aliases of pages that `owner` owns. Nothing in flight may use them here."""
        pages = self.pages(at, n)
        self._pool.remove_holder(owner, pages, self.owner)
        try:
            self._vm.unmap(self._range, at, n)
        except DeviceError:
            self._pool.add_holder(owner, pages, self.owner)
            raise
        self._slots[at : at + n] = array("i", [_EMPTY]) * n
        self.aliased -= n

    def map_host(self, at: int, source: int, n_bytes: int) -> None:
        """Map host memory at indices `at ..`, read only: no page is used (`Vm.map_host`).

        Raises BrokenPromise if part of that is backed; a failing map (DeviceError) changes nothing.
        """
        n = ceil_div(n_bytes, self.page_bytes)
        if self._check_empty(((at, n),)):
            raise BrokenPromise(f"{self.owner}: pages at {at} .. are still leaving")
        self._vm.map_host(self._range, at, source, n_bytes)
        self._slots[at : at + n] = array("i", [_HOST]) * n
        self.on_host += n

    def unmap_host(self, at: int, source: int, n_bytes: int) -> None:
        """Unmap host memory that was mapped with these arguments. Nothing in flight may read it."""
        n = ceil_div(n_bytes, self.page_bytes)
        if self._within(at, n).count(_HOST) != n:
            raise BrokenPromise(f"{self.owner}: no host memory at {at} .. {at + n}")
        self._vm.unmap_host(self._range, at, source, n_bytes)
        self._slots[at : at + n] = array("i", [_EMPTY]) * n
        self.on_host -= n

    def hand_to(self, at: int, n: int, target: BackedRange, to: int) -> None:
        """Move the pages at `at ..` to another range and its owner; contents are kept.

        Nothing in flight may use them. Raises BrokenPromise if the target is backed there.
        """
        pages = self.pages(at, n)
        if target._check_empty(((to, n),)):
            raise BrokenPromise(f"{target.owner}: pages at {to} .. {to + n} are still leaving")
        self._pool.hand_over(self.owner, target.owner, pages)
        self._vm.unmap(self._range, at, n)
        try:
            small = n * self.page_bytes <= _PREFAULT_BYTES
            self._vm.map(target._range, to, pages, prefault=small)
        except DeviceError:
            self._vm.map(self._range, at, pages)
            self._pool.hand_over(target.owner, self.owner, pages)
            raise
        self._slots[at : at + n] = array("i", [_EMPTY]) * n
        self.backed -= n
        target._slots[to : to + n] = array("i", pages)
        target.backed += n

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
        if self._check_empty(((at, len(pages)),)):
            raise BrokenPromise(f"{self.owner}: pages at {at} .. are still leaving")
        self._pool.hand_over(owner, self.owner, pages)
        try:
            self._vm.map(self._range, at, pages)
        except DeviceError:
            self._pool.hand_over(self.owner, owner, pages)
            raise
        self._slots[at : at + len(pages)] = array("i", pages)
        self.backed += len(pages)

    def close(self, fence: Fence | None = None) -> None:
        """Release everything; the addresses go once the last page has left. Aliases are gone."""
        if self._closed:
            return
        for at, n in self._stretches():
            self.release(at, n, fence)
        self._closed = True
        self._release_addresses()

    def os_backed(self) -> int:
        """Pages the operating system shows mapped here; equals `backed + aliased + leaving`."""
        return 0 if self._closed and not self.leaving else self._vm.os_mapped(self._range)

    def validate(self) -> None:
        """Raises BrokenPromise unless every page here is the owner's or lent to it, as counted."""
        here = [page for page in self._slots if page >= 0]
        others = [page for page in here if self._pool.ledger.owner_of(page) != self.owner]
        marked = (self._slots.count(_LEAVING), self._slots.count(_HOST))
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
        prefault = len(pages) * self.page_bytes <= _PREFAULT_BYTES
        try:
            for at, n in where:
                self._vm.map(self._range, at, pages[start : start + n], prefault=prefault)
                done.append((at, n))
                start += n
        except DeviceError:
            for at, n in done:
                self._vm.unmap(self._range, at, n)
            self._pool.give_back(self.owner, pages)
            raise
        start = 0
        for at, n in where:
            self._slots[at : at + n] = array("i", pages[start : start + n])
            start += n
        self.backed += len(pages)

    def _leave(self, at: int, n: int) -> None:
        self._vm.unmap(self._range, at, n)
        self._slots[at : at + n] = array("i", [_EMPTY]) * n
        self.leaving -= n
        self._release_addresses()

    def _release_addresses(self) -> None:
        if self._closed and not self.leaving:
            self._vm.release(self._range)

    def _check_empty(self, where: Sequence[tuple[int, int]]) -> int:
        """How many of the indices still hold a leaving page; none may be backed or named twice."""
        leaving = 0
        for at, n in where:
            slots = self._within(at, n)
            leaving += slots.count(_LEAVING)
            if slots.count(_EMPTY) + slots.count(_LEAVING) != n:
                raise BrokenPromise(f"{self.owner}: part of {at} .. {at + n} is backed already")
        if len(where) > 1:
            ordered = sorted(where)
            for (at, n), (after, _) in pairwise(ordered):
                if at + n > after:
                    raise BrokenPromise(f"{self.owner}: index {after} is named twice")
        return leaving

    def _within(self, at: int, n: int) -> array[int]:
        if self._closed:
            raise BrokenPromise(f"{self.owner}: the range is closed")
        if not 0 <= at <= at + n <= len(self._slots):
            raise BrokenPromise(
                f"{self.owner}: {at} .. {at + n} is outside {len(self._slots)} pages"
            )
        return self._slots[at : at + n]

    def _stretches(self) -> list[tuple[int, int]]:
        """Maximal `(at, n)` of backed indices."""
        found: list[tuple[int, int]] = []
        for at, page in enumerate(self._slots):
            if page < 0:
                continue
            if found and found[-1][0] + found[-1][1] == at:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((at, 1))
        return found
