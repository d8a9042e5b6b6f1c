"""Allocate and free the pages of one device: the elastic pool of weights, KV and activations.

Used by ranges, KV caches, weights, arenas and leases, live and in virtual time. Short of pages, it
returns `Short`: it never evicts, and decides nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.free_pages import FreePages
from ballast.memory.ledger import Ledger
from ballast.memory.vm import Fence, Vm


@dataclass(slots=True)
class _Reclaim:
    owner: str
    pages: tuple[int, ...]
    fence: Fence | None
    release: Callable[[], None] | None


class Pool:
    """Allocator of a device's pages; `ledger` records who owns and who holds each of them.

    Allocated pages have physical memory, so that touching them cannot fail; an arena allocates bare
    ones. Safe to use beside one `PopulatedReserve` thread; otherwise one thread at a time.
    """

    def __init__(self, vm: Vm, n_pages: int) -> None:
        if not 0 < n_pages <= vm.n_pages:
            raise BrokenPromise(f"a pool of {n_pages} pages on a device of {vm.n_pages}")
        self.vm = vm
        self.ledger = Ledger(n_pages)
        self._lock = threading.Lock()
        """Held while the ledger and the free pages change together."""
        self.free_pages = FreePages(vm, n_pages, self._lock)
        self._reclaims: deque[_Reclaim] = deque()
        self.on_allocate: Callable[[], None] | None = None
        """Called after each allocation; for the reserve."""
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
        with self._lock:
            picked = self._pick(owner, n, bare, near)
        if picked is None:
            # Some free pages are with the reserve: wait for its step (below a millisecond).
            with self.free_pages.step_lock, self._lock:
                picked = self._pick(owner, n, bare, near)
        if picked is None:
            raise BrokenPromise("free pages of the ledger are nowhere to be found")
        if isinstance(picked, Short):
            return picked
        try:
            short = None
            if bare:
                self.free_pages.strip(picked)
            else:
                short = self.free_pages.fill(picked)
        except DeviceError:
            self._undo(owner, picked, promised)
            raise
        if short is not None:
            self._undo(owner, picked, promised)
            self.unfilled += 1
            return short
        if self.on_allocate is not None:
            self.on_allocate()
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
        with self._lock:
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
        with self._lock:
            changed = self.ledger.reservations.guarantee(owner, n)
        self.freed.n += changed

    def promise(self, owner: str, n: int) -> Short | None:
        """Reserve `n` more pages for `owner`, out of those free, reclaiming and unpromised."""
        with self._lock:
            return self.ledger.promise(owner, n)

    def cancel_promise(self, owner: str) -> int:
        """Cancel all that is promised to `owner`, until it is promised anew; returns the number of
        pages. It does not count as `freed`."""
        with self._lock:
            return self.ledger.reservations.cancel(owner)

    def replace_promise(self, owner: str, n: int) -> Short | None:
        """Reserve `n` pages for `owner` in place of those that were, or change nothing."""
        with self._lock:
            before = self.ledger.reservations.cancel(owner)
            short = self.ledger.promise(owner, n)
            if short is not None:
                self.ledger.promise(owner, before)
        self.freed.n += short is None and n < before
        return short

    def hand_over(self, source: str, target: str, pages: Sequence[int]) -> None:
        """Change the owner of populated pages directly. Mappings are the caller's business."""
        has_memory = self.free_pages.has_memory
        for page in pages:
            if page >= self.total or not has_memory[page]:
                raise BrokenPromise(f"page {page} of {source} is bare, or another device's")
        with self._lock:
            self.ledger.hand_over(source, target, pages)

    def add_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Record that `holder` uses pages of `owner`, which cannot be freed meanwhile."""
        with self._lock:
            self.ledger.add_holder(owner, pages, holder)

    def remove_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Undo one `add_holder` of each page, once the holder has unmapped it."""
        with self._lock:
            self.ledger.remove_holder(owner, pages, holder)

    def borrow(self, peer: str, pages: Sequence[int]) -> None:
        """Make attached pages of the device `peer` usable: owners of this pool can hold them. They
        have memory, and count neither as the pool's nor against its budget."""
        if pages and min(pages) < self.vm.n_pages:
            raise BrokenPromise(f"borrowed from {peer} a page of our own")
        with self._lock:
            self.ledger.borrow(peer, pages)
        self.freed.n += 1

    def return_borrowed(self, peer: str, pages: Sequence[int]) -> None:
        """Give borrowed pages, which no owner here holds, back to `peer`."""
        with self._lock:
            self.ledger.return_borrowed(peer, pages)

    def validate(self) -> None:
        """Raises BrokenPromise unless counts, owners, promises and free pages all agree.

        A few vectorised passes over the pages: tens of microseconds for a thousand of them.
        """
        with self.free_pages.step_lock, self._lock:
            self.ledger.validate()
            self.free_pages.validate(self.ledger.free_mask())
            if sum(len(entry.pages) for entry in self._reclaims) != self.ledger.reclaiming:
                raise BrokenPromise("reclaiming pages are not those that wait for a fence")

    def _pick(
        self, owner: str, n: int, bare: bool, near: int | None
    ) -> tuple[int, ...] | Short | None:
        """Allocate in the ledger; None if some of the pages are in the reserve's hands."""
        short = n - self.ledger.available(owner)
        if short > 0:
            return Short(short)
        pages = self.free_pages.pop(n, near, bare=bare)
        if pages is None:
            return None
        self.ledger.allocate(owner, pages)
        return tuple(pages)

    def _undo(self, owner: str, pages: tuple[int, ...], promised: int) -> None:
        """Undo an allocation that could not be populated."""
        with self._lock:
            self.ledger.give_back(owner, pages)
            self.ledger.freed(owner, pages)
            self.free_pages.add(pages)
            self.ledger.promise(owner, promised - self.ledger.reservations.promised_to(owner))

    def _end(self, entry: _Reclaim) -> None:
        if entry.release is not None:
            try:
                entry.release()
            except DeviceError:
                # Still mapped, so still reclaiming; the next reap tries again.
                self._reclaims.append(entry)
                raise
        with self._lock:
            self.ledger.freed(entry.owner, entry.pages)
            self.free_pages.add(entry.pages)
        self.freed.n += 1
