"""Allocate and free the pages of one device: the elastic pool of weights, KV and activations.

Used by ranges, KV caches, weights, arenas and leases, live and in virtual time. Short of pages, it
returns `Short`: it never evicts, and decides nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.ledger import Ledger
from ballast.memory.runs import Runs
from ballast.memory.vm import Fence, Vm


@dataclass(slots=True)
class _Reclaim:
    owner: str
    pages: tuple[int, ...]
    fence: Fence | None
    release: Callable[[], None] | None


class Pool:
    """Allocator of a device's pages; `ledger` records who owns and who holds each of them.

    Free pages are *populated* (they have physical memory) or *bare*. Allocated pages are populated,
    so that touching them cannot fail; an arena allocates bare ones. Safe to use beside one
    `PopulatedReserve` thread; otherwise one thread at a time.
    """

    def __init__(self, vm: Vm, n_pages: int) -> None:
        if not 0 < n_pages <= vm.n_pages:
            raise BrokenPromise(f"a pool of {n_pages} pages on a device of {vm.n_pages}")
        self.vm = vm
        self.ledger = Ledger(n_pages)
        self._has_memory = bytearray(n_pages)
        self._populated = Runs()
        self._bare = Runs(range(n_pages))
        self._reclaims: deque[_Reclaim] = deque()
        # Order: _populate_lock before _ledger_lock. The first is held while the reserve populates a
        # page or discards it; such pages are free in the ledger and in neither set.
        self._populate_lock = threading.Lock()
        self._ledger_lock = threading.Lock()
        self._on_allocate: Callable[[], None] | None = None
        self.freed = ChangeCounter()
        """Counts changes after which a refused allocation may succeed: pages became free, or can be
        borrowed. KV caches and promises on this pool count their own changes in it too. A refusal
        never makes it grow."""
        self.unfilled = 0
        """Allocations that were `Short` of the machine's memory, not of pages."""

    @property
    def total(self) -> int:
        return self.ledger.total

    @property
    def free(self) -> int:
        """Pages without an owner, promised ones included."""
        return self.ledger.free

    @property
    def populated(self) -> int:
        """Free pages that have physical memory already."""
        return len(self._populated)

    def available(self, owner: str) -> int:
        """Pages that `owner` could allocate now."""
        return self.ledger.available(owner)

    def allocate(
        self, owner: str, n: int, *, bare: bool = False, near: int | None = None
    ) -> tuple[int, ...] | Short:
        """Allocate `n` pages to `owner`, or none; in as few runs of neighbours as is cheap to find.

        Contents are undefined. Pages promised to others are not used; the owner's own promise
        is used up first. The pages have physical memory; with `bare` they have none. `near`: page
        after which the new ones should preferably follow.
        """
        if n < 0:
            raise BrokenPromise(f"{owner} allocates {n} pages")
        promised = self.ledger.reservations.promised_to(owner)
        with self._ledger_lock:
            picked = self._pick(owner, n, bare, near)
        if picked is None:
            # Some free pages are with the reserve: wait for its step (below a millisecond).
            with self._populate_lock, self._ledger_lock:
                picked = self._pick(owner, n, bare, near)
        if picked is None:
            raise BrokenPromise("free pages of the ledger are nowhere to be found")
        if isinstance(picked, Short):
            return picked
        try:
            short = None
            if bare:
                self._strip(picked)
            else:
                short = self._fill(picked)
        except DeviceError:
            self._undo(owner, picked, promised)
            raise
        if short is not None:
            self._undo(owner, picked, promised)
            self.unfilled += 1
            return short
        if self._on_allocate is not None:
            self._on_allocate()
        return picked

    def give_back(
        self,
        owner: str,
        pages: Sequence[int],
        fence: Fence | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Free pages; with a fence that is not done they are reclaiming until `reap`.

        `release` (unmapping, usually) is called just before they become free.
        """
        if not pages:
            return
        entry = _Reclaim(owner, tuple(pages), fence, release)
        with self._ledger_lock:
            self.ledger.give_back(owner, pages)
        if fence is None or fence.done():
            self._end(entry)
        else:
            self._reclaims.append(entry)

    def reap(self) -> int:
        """Free the reclaiming pages whose fence is done; returns their number."""
        n = 0
        for _ in range(len(self._reclaims)):
            entry = self._reclaims.popleft()
            if entry.fence is None or entry.fence.done():
                self._end(entry)
                n += len(entry.pages)
            else:
                self._reclaims.append(entry)
        return n

    def guarantee(self, owner: str, n: int) -> None:
        """Keep what `owner` lacks of `n` pages from all others (`Ledger.guarantee`)."""
        with self._ledger_lock:
            changed = self.ledger.reservations.guarantee(owner, n)
        self.freed.n += changed

    def promise(self, owner: str, n: int) -> Short | None:
        """Reserve `n` more pages for `owner`, out of those free, reclaiming and unpromised."""
        with self._ledger_lock:
            return self.ledger.promise(owner, n)

    def cancel_promise(self, owner: str) -> int:
        """Cancel all that is promised to `owner`, until it is promised anew; returns the number of
        pages. It does not count as `freed`."""
        with self._ledger_lock:
            return self.ledger.reservations.cancel(owner)

    def replace_promise(self, owner: str, n: int) -> Short | None:
        """Reserve `n` pages for `owner` in place of those that were, or change nothing."""
        with self._ledger_lock:
            before = self.ledger.reservations.cancel(owner)
            short = self.ledger.promise(owner, n)
            if short is not None:
                self.ledger.promise(owner, before)
        self.freed.n += short is None and n < before
        return short

    def hand_over(self, source: str, target: str, pages: Sequence[int]) -> None:
        """Change the owner of populated pages directly. Mappings are the caller's business."""
        for page in pages:
            if page >= self.total or not self._has_memory[page]:
                raise BrokenPromise(f"page {page} of {source} is bare, or another device's")
        with self._ledger_lock:
            self.ledger.hand_over(source, target, pages)

    def add_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Record that `holder` uses pages of `owner`, which cannot be freed meanwhile."""
        with self._ledger_lock:
            self.ledger.add_holder(owner, pages, holder)

    def remove_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Undo one `add_holder` of each page, once the holder has unmapped it."""
        with self._ledger_lock:
            self.ledger.remove_holder(owner, pages, holder)

    def borrow(self, peer: str, pages: Sequence[int]) -> None:
        """Make attached pages of the device `peer` usable: owners of this pool can hold them. They
        have memory, and count neither as the pool's nor against its budget."""
        if pages and min(pages) < self.vm.n_pages:
            raise BrokenPromise(f"borrowed from {peer} a page of our own")
        with self._ledger_lock:
            self.ledger.borrow(peer, pages)
        self.freed.n += 1

    def return_borrowed(self, peer: str, pages: Sequence[int]) -> None:
        """Give borrowed pages, which no owner here holds, back to `peer`."""
        with self._ledger_lock:
            self.ledger.return_borrowed(peer, pages)

    def populate_some(self, n: int) -> int | Short:
        """Populate up to `n` free bare pages; returns how many (0: none was bare)."""
        with self._populate_lock:
            with self._ledger_lock:
                pages = self._bare.pop(n)
            had = False
            try:
                short = self._populate(pages)
                had = short is None
            finally:
                with self._ledger_lock:
                    for page in pages:
                        self._has_memory[page] = had
                    (self._populated if had else self._bare).add(pages)
            return len(pages) if short is None else short

    def discard_some(self, n: int) -> int:
        """Give the memory of up to `n` populated free pages back to the machine; returns how many.
        Raises DeviceError, with the pages populated as before."""
        with self._populate_lock:
            with self._ledger_lock:
                pages = self._populated.pop(n)
            has = True
            try:
                self.vm.discard(pages)
                has = False
            finally:
                with self._ledger_lock:
                    for page in pages:
                        self._has_memory[page] = has
                    (self._populated if has else self._bare).add(pages)
            return len(pages)

    def on_allocate(self, call: Callable[[], None] | None) -> None:
        """Set a callback after each allocation; for the reserve."""
        self._on_allocate = call

    def validate(self) -> None:
        """Raises BrokenPromise unless counts, owners, promises and free pages all agree.

        A few vectorised passes over the pages: tens of microseconds for a thousand of them.
        """
        with self._populate_lock, self._ledger_lock:
            self.ledger.validate()
            populated = self._populated.mask(self.total)
            bare = self._bare.mask(self.total)
            has_memory = np.frombuffer(self._has_memory, dtype=np.bool_)
            if (populated & bare).any() or ((populated | bare) != self.ledger.free_mask()).any():
                raise BrokenPromise("the free pages are not those the ledger calls free")
            if (populated & ~has_memory).any() or (bare & has_memory).any():
                raise BrokenPromise("a free page is in the wrong set")
            if sum(len(entry.pages) for entry in self._reclaims) != self.ledger.reclaiming:
                raise BrokenPromise("reclaiming pages are not those that wait for a fence")

    def _pick(
        self, owner: str, n: int, bare: bool, near: int | None
    ) -> tuple[int, ...] | Short | None:
        """Allocate in the ledger; None if some of the pages are in the reserve's hands."""
        short = n - self.ledger.available(owner)
        if short > 0:
            return Short(short)
        if len(self._populated) + len(self._bare) < n:
            return None
        first, second = self._populated, self._bare
        if bare:
            first, second = second, first
        pages = first.pop(n, near)
        pages += second.pop(n - len(pages), near)
        self.ledger.allocate(owner, pages)
        return tuple(pages)

    def _fill(self, pages: Sequence[int]) -> Short | None:
        bare = [page for page in pages if not self._has_memory[page]]
        if not bare:
            return None
        short = self._populate(bare)
        if short is None:
            for page in bare:
                self._has_memory[page] = True
        return short

    def _populate(self, bare: Sequence[int]) -> Short | None:
        """Populate all of the pages or none: discard those populated before memory ran out."""
        short = self.vm.populate(bare)
        if short is not None:
            self.vm.discard(bare)
        return short

    def _strip(self, pages: Sequence[int]) -> None:
        full = [page for page in pages if self._has_memory[page]]
        if full:
            self.vm.discard(full)
            for page in full:
                self._has_memory[page] = False

    def _undo(self, owner: str, pages: tuple[int, ...], promised: int) -> None:
        """Undo an allocation that could not be populated."""
        with self._ledger_lock:
            self.ledger.give_back(owner, pages)
            self._free(owner, pages)
            self.ledger.promise(owner, promised - self.ledger.reservations.promised_to(owner))

    def _end(self, entry: _Reclaim) -> None:
        if entry.release is not None:
            try:
                entry.release()
            except DeviceError:
                # Still mapped, so still reclaiming; the next reap tries again.
                self._reclaims.append(entry)
                raise
        with self._ledger_lock:
            self._free(entry.owner, entry.pages)
        self.freed.n += 1

    def _free(self, owner: str, pages: Sequence[int]) -> None:
        self.ledger.freed(owner, pages)
        has_memory = self._has_memory
        self._populated.add(page for page in pages if has_memory[page])
        self._bare.add(page for page in pages if not has_memory[page])
