"""All pages of one device: the ledger, the free pages ready to be taken, those still in use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.version import Version
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
    """Who owns each page of a device, and where the next page comes from.

    Free pages are *populated* (they have physical memory) or *bare*. Whoever leases gets populated
    pages, so that touching them cannot fail; an arena asks for bare ones. Safe to use beside one
    `PopulatedReserve` thread; otherwise one thread at a time.
    """

    def __init__(self, vm: Vm, n_pages: int) -> None:
        if not 0 < n_pages <= vm.n_pages:
            raise BrokenPromise(f"a pool of {n_pages} pages on a device of {vm.n_pages}")
        self.vm = vm
        self._ledger = Ledger(n_pages)
        self._has_memory = bytearray(n_pages)
        self._populated = Runs()
        self._bare = Runs(range(n_pages))
        self._reclaims: deque[_Reclaim] = deque()
        # Order: _step before _books. _step is held while a page is being populated by the reserve;
        # such pages are free in the ledger and in neither set.
        self._step = threading.Lock()
        self._books = threading.Lock()
        self._on_taken: Callable[[], None] | None = None
        self.freed = Version()
        """Grows whenever what was refused for want of pages may be granted: pages became free, or
        can be borrowed. KV caches and promises, which live on these pages, count in it what they
        give up. A refusal never makes it grow."""
        self.unfilled = 0
        """Leases that were `Short` for want of the machine's memory, not of pages."""

    @property
    def total(self) -> int:
        return self._ledger.total

    @property
    def free(self) -> int:
        """Pages without an owner, promised ones included."""
        return self._ledger.free

    @property
    def reclaiming(self) -> int:
        """Pages given back whose last use is not over; `reap` frees them."""
        return self._ledger.reclaiming

    @property
    def promised(self) -> int:
        return self._ledger.promised

    @property
    def populated(self) -> int:
        """Free pages that have physical memory already."""
        return len(self._populated)

    def owned(self, owner: str) -> int:
        return self._ledger.owned(owner)

    def owners(self) -> dict[str, int]:
        """Adds up to total - free - reclaiming."""
        return self._ledger.owners()

    def owner_of(self, page: int) -> str | None:
        return self._ledger.owner_of(page)

    def holders_of(self, page: int) -> tuple[str, ...]:
        """Who uses the page besides its owner, once for each time it was lent."""
        return self._ledger.holders_of(page)

    def held(self, holder: str) -> int:
        """Pages lent to `holder`; one lent to it twice counts twice."""
        return self._ledger.held(holder)

    def reclaiming_of(self, owner: str) -> int:
        return self._ledger.reclaiming_of(owner)

    def promised_to(self, owner: str) -> int:
        return self._ledger.promised_to(owner)

    def available(self, owner: str) -> int:
        """Pages a lease by `owner` could get now."""
        return self._ledger.available(owner)

    def lease(
        self, owner: str, n: int, *, bare: bool = False, near: int | None = None
    ) -> tuple[int, ...] | Short:
        """`n` free pages for `owner`, or none; in as few runs of neighbours as is cheap to find.

        Contents are undefined. Sees what is free less what is promised to others, and uses up the
        owner's own promise. The pages have physical memory; with `bare` they have none. `near`: a
        page after which the first of the new ones would fit best.
        """
        if n < 0:
            raise BrokenPromise(f"{owner} leases {n} pages")
        promised = self._ledger.promised_to(owner)
        with self._books:
            picked = self._pick(owner, n, bare, near)
        if picked is None:
            # Some free pages are with the reserve: wait for its step (below a millisecond).
            with self._step, self._books:
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
        if self._on_taken is not None:
            self._on_taken()
        return picked

    def give_back(
        self,
        owner: str,
        pages: Sequence[int],
        fence: Fence | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Pages become free; with a fence that is not done they are reclaiming until `reap`.

        `release` (unmapping, usually) is called just before they become free.
        """
        if not pages:
            return
        entry = _Reclaim(owner, tuple(pages), fence, release)
        with self._books:
            self._ledger.give_back(owner, pages)
        if fence is None or fence.done():
            self._end(entry)
        else:
            self._reclaims.append(entry)

    def reap(self) -> int:
        """Free the reclaiming pages whose fence is done; how many that were."""
        n = 0
        for _ in range(len(self._reclaims)):
            entry = self._reclaims.popleft()
            if entry.fence is None or entry.fence.done():
                self._end(entry)
                n += len(entry.pages)
            else:
                self._reclaims.append(entry)
        return n

    def promise(self, owner: str, n: int) -> Short | None:
        """Set `n` more pages aside for `owner`, out of those free, reclaiming and unpromised."""
        with self._books:
            return self._ledger.promise(owner, n)

    def withdraw(self, owner: str) -> int:
        """Forget all that is promised to `owner`, until that is promised anew; how many pages that
        was. It does not count as `freed`."""
        with self._books:
            return self._ledger.withdraw(owner)

    def promise_instead(self, owner: str, n: int) -> Short | None:
        """Set `n` pages aside for `owner` instead of those that were, or change nothing."""
        with self._books:
            before = self._ledger.withdraw(owner)
            short = self._ledger.promise(owner, n)
            if short is not None:
                self._ledger.promise(owner, before)
        self.freed.n += short is None and n < before
        return short

    def hand_over(self, source: str, target: str, pages: Sequence[int]) -> None:
        """Populated pages change owner directly. Who maps them where is the caller's business."""
        for page in pages:
            if page >= self.total or not self._has_memory[page]:
                raise BrokenPromise(f"page {page} of {source} is bare, or another device's")
        with self._books:
            self._ledger.hand_over(source, target, pages)

    def lend(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """`holder`, too, uses pages that stay the owner's, who cannot give them back meanwhile."""
        with self._books:
            self._ledger.lend(owner, pages, holder)

    def recall(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """The holder has let go of the pages once; their owner answers for them as before."""
        with self._books:
            self._ledger.recall(owner, pages, holder)

    def lent(self, owner: str) -> dict[str, int]:
        """Pages of `owner` that others use, by holder."""
        return self._ledger.lent(owner)

    def borrow(self, peer: str, pages: Sequence[int]) -> None:
        """Attached pages of the device `peer` can be lent by it to owners of this pool. They have
        memory, and count neither as the pool's nor against its budget."""
        if pages and min(pages) < self.vm.n_pages:
            raise BrokenPromise(f"borrowed from {peer} a page of our own")
        with self._books:
            self._ledger.borrow(peer, pages)
        self.freed.n += 1

    def restore(self, peer: str, pages: Sequence[int]) -> None:
        """Borrowed pages that no owner here holds are the peer's alone again."""
        with self._books:
            self._ledger.restore(peer, pages)

    def borrowed(self, peer: str | None = None) -> int:
        """Pages borrowed from `peer`, or from all peers, in use or not."""
        return self._ledger.borrowed(peer)

    def populate_some(self, n: int) -> int | Short:
        """Give up to `n` free bare pages physical memory; how many got it (0: none was bare)."""
        with self._step:
            with self._books:
                taken = self._bare.take(n)
            had = False
            try:
                short = self._populate(taken)
                had = short is None
            finally:
                with self._books:
                    for page in taken:
                        self._has_memory[page] = had
                    (self._populated if had else self._bare).add(taken)
            return len(taken) if short is None else short

    def on_taken(self, call: Callable[[], None] | None) -> None:
        """`call` after each lease; for the reserve."""
        self._on_taken = call

    def validate(self) -> None:
        """Raises BrokenPromise unless counts, owners, promises and free pages all agree.

        A few vectorised passes over the pages: tens of microseconds for a thousand of them.
        """
        with self._step, self._books:
            self._ledger.validate()
            populated = self._populated.mask(self.total)
            bare = self._bare.mask(self.total)
            has_memory = np.frombuffer(self._has_memory, dtype=np.bool_)
            if (populated & bare).any() or ((populated | bare) != self._ledger.free_mask()).any():
                raise BrokenPromise("the free pages are not those the ledger calls free")
            if (populated & ~has_memory).any() or (bare & has_memory).any():
                raise BrokenPromise("a free page is in the wrong set")
            if sum(len(entry.pages) for entry in self._reclaims) != self.reclaiming:
                raise BrokenPromise("reclaiming pages are not those that wait for a fence")

    def _pick(
        self, owner: str, n: int, bare: bool, near: int | None
    ) -> tuple[int, ...] | Short | None:
        """Lease in the books; None if the reserve has some of the pages in hand."""
        short = n - self._ledger.available(owner)
        if short > 0:
            return Short(short)
        if len(self._populated) + len(self._bare) < n:
            return None
        first, second = self._populated, self._bare
        if bare:
            first, second = second, first
        pages = first.take(n, near)
        pages += second.take(n - len(pages), near)
        self._ledger.lease(owner, pages)
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
        """All of them or none: what was had before memory ran out goes back to the machine."""
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
        """A lease that could not be filled: the books as before it."""
        with self._books:
            self._ledger.give_back(owner, pages)
            self._free(owner, pages)
            self._ledger.promise(owner, promised - self._ledger.promised_to(owner))

    def _end(self, entry: _Reclaim) -> None:
        if entry.release is not None:
            try:
                entry.release()
            except DeviceError:
                # Still mapped, so still reclaiming; the next reap tries again.
                self._reclaims.append(entry)
                raise
        with self._books:
            self._free(entry.owner, entry.pages)
        self.freed.n += 1

    def _free(self, owner: str, pages: Sequence[int]) -> None:
        self._ledger.freed(owner, pages)
        has_memory = self._has_memory
        self._populated.add(page for page in pages if has_memory[page])
        self._bare.add(page for page in pages if not has_memory[page])
