"""Keep pages borrowed from other devices, give them to KV caches, and return them on recall.

The borrower's side of lending: used by KV caches to back blocks, and by the engine's `Lending`.
`lender` draws the exchange of messages. A borrowed page is mapped in the window, at a number above
the device's own, from the lease until its return; in between KV caches use it like a page of the
pool, without a call. The ledger has the lending device as its owner and the cache's as its holder,
and it counts neither in the pool nor against the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.lease import Lease
from ballast.memory.pool import Pool
from ballast.memory.runs import Runs
from ballast.memory.vm import Exported, Vm


@dataclass(frozen=True, slots=True)
class BorrowedPage:
    """A borrowed page in use: its number on this device, and its holder."""

    page: int
    holder: str


@dataclass(slots=True)
class _Peer:
    """A lender's process. Its pages are identified by their numbers on this device."""

    name: str
    epoch: int
    first: int
    """The number of its page 0 here."""
    n_pages: int
    memory: tuple[int, int]
    """The device that its exports name."""
    by_page: bool
    """Whether its pages come with each lease."""
    lease_of: dict[int, int] = field(default_factory=dict)
    unused: Runs = field(default_factory=Runs)
    due: dict[int, None] = field(default_factory=dict)
    """Pages to return: recalled, or offered back."""
    gone: bool = False


class Borrower:
    """Pages borrowed from other devices. All calls come from the pool's thread."""

    def __init__(self, pool: Pool, vm: Vm, device: str) -> None:
        self._pool, self._vm, self._device = pool, vm, device
        self._peers: list[_Peer] = []
        self._holders: dict[int, str] = {}
        """Holder of each page in use."""

    @property
    def unused(self) -> int:
        """Pages that `take` could give now."""
        return sum(len(peer.unused) for peer in self._peers)

    def unused_of(self) -> tuple[tuple[str, int], ...]:
        """(lender, its pages in `unused`), without lenders that have none."""
        return tuple((peer.name, len(peer.unused)) for peer in self._peers if peer.unused)

    @property
    def in_use(self) -> int:
        """Pages that holders have now."""
        return len(self._holders)

    def meet(self, lender: str, epoch: int, exported: Exported) -> None:
        """Register a process that may lend, and import its device; takes over `exported.fd`.

        Raises DeviceError, with the descriptor left open, if that cannot be mapped.
        """
        if self._peer(lender) is not None:
            raise BrokenPromise(f"{self._device} meets {lender} twice")
        first = self._vm.attach(exported)
        by_page = exported.page_fds is not None
        self._peers.append(_Peer(lender, epoch, first, exported.n_pages, exported.device, by_page))

    def accept(self, lease: Lease, opened: Sequence[Exported] = ()) -> str | None:
        """Accept pages to use until they are recalled; returns why the lease is refused, if it is.

        `opened`: a GPU's exports of just these pages, by `CudaVm.open`; taken over in any case.
        Raises DeviceError, with the lease not accepted, if the pages cannot be mapped.
        """
        refused = self._refusal(lease, opened)
        for exported in opened:
            if refused is None:
                self._vm.attach(exported)
            else:
                exported.close()
        if refused is not None:
            return refused
        peer = self._peer(lease.lender)
        assert peer is not None
        pages = [peer.first + page for page in lease.pages]
        self._vm.enter(pages)
        self._pool.borrow(peer.name, pages)
        peer.lease_of.update(dict.fromkeys(pages, lease.id))
        peer.unused.add(pages)
        return None

    def _refusal(self, lease: Lease, opened: Sequence[Exported]) -> str | None:
        peer = self._peer(lease.lender, lease.epoch)
        if peer is None or lease.borrower != self._device:
            return f"epoch {lease.epoch} of {lease.lender} is not one with {self._device}"
        if not lease.pages or not 0 <= min(lease.pages) <= max(lease.pages) < peer.n_pages:
            return f"lease {lease.id} names pages that {lease.lender} has not"
        pages = [peer.first + page for page in lease.pages]
        if len(set(pages)) < len(pages) or not peer.lease_of.keys().isdisjoint(pages):
            return f"lease {lease.id} names pages that are lent already"
        got = [page for exported in opened for page in exported.pages]
        same = got == [*lease.pages] and {e.device for e in opened} == {peer.memory}
        if (peer.by_page or opened) and not same:
            return f"lease {lease.id} is of other pages than those that came"
        return None

    def take(self, holder: str, n: int) -> tuple[int, ...] | Short:
        """Give `n` unused pages to `holder`, of one lender if one has as many; or none."""
        if n < 0:
            raise BrokenPromise(f"{holder} borrows {n} pages")
        if self.unused < n:
            return Short(n - self.unused)
        found: list[int] = []
        for peer, pages in self._pop_unused(n):
            self._pool.add_holder(peer.name, pages, holder)
            found += pages
        self._holders.update(dict.fromkeys(found, holder))
        return tuple(found)

    def release(self, holder: str, pages: Sequence[int]) -> None:
        """Take pages back from `holder`; no work in flight may use them. Unless they were recalled,
        `take` can give them to another then."""
        for page in pages:
            if self._holders.get(page) != holder:
                raise BrokenPromise(f"{holder}: page {page} is not borrowed")
        for name, run in groupby(pages, key=self._pool.ledger.owner_of):
            given = list(run)
            self._pool.remove_holder(name or "", given, holder)
            for page in given:
                del self._holders[page]
            for peer in self._peers:
                peer.unused.add(p for p in given if p in peer.lease_of and p not in peer.due)

    def recall(self, part: Lease) -> tuple[BorrowedPage, ...]:
        """Recall pages; returns those in use. Copy out or drop what is there and `release` them;
        `settle` returns the answers. Pages on their way back are ignored."""
        peer = self._peer(part.lender, part.epoch)
        if peer is None:
            return ()
        pages = (peer.first + page for page in part.pages)
        return self._ask_back(peer, [p for p in pages if peer.lease_of.get(p) == part.id])

    def wanted(self) -> tuple[BorrowedPage, ...]:
        """Return the recalled or offered-back pages that are still in use."""
        return tuple(self._in_use(page for peer in self._peers for page in peer.due))

    def knows(self, lender: str, epoch: int) -> bool:
        """Whether that process is registered."""
        return any((peer.name, peer.epoch) == (lender, epoch) for peer in self._peers)

    def borrowed(self) -> dict[str, int]:
        """Number of pages that this device has borrowed and not returned, by lender."""
        found: dict[str, int] = {}
        for peer in self._peers:
            if peer.lease_of:
                found[peer.name] = found.get(peer.name, 0) + len(peer.lease_of)
        return found

    def offer_back(self, lender: str, n: int) -> int:
        """Return up to `n` unused pages without a recall, at the next `settle`; returns their
        number."""
        peer = self._peer(lender)
        if peer is None:
            return 0
        pages = peer.unused.pop(n)
        peer.due.update(dict.fromkeys(pages))
        return len(pages)

    def gone(self, lender: str, epoch: int) -> tuple[BorrowedPage, ...]:
        """Handle the end of a lender's process; returns its pages that are in use. They keep their
        contents, and its memory lasts, until they are released."""
        peer = self._peer(lender, epoch)
        if peer is None:
            return ()
        peer.gone = True
        return self._ask_back(peer, list(peer.lease_of))

    def settle(self) -> list[Lease]:
        """Unmap and forget all pages that can be returned now; returns the messages for lenders
        (`Lender.returned`), each once.

        When the last page of a lender that is gone is released, its memory is the machine's again.
        """
        returned: list[Lease] = []
        for peer in list(self._peers):
            pages = [page for page in peer.due if not self._pool.ledger.holders.of(page)]
            if pages:
                self._vm.leave(pages)
                self._vm.forget(pages)
                self._pool.return_borrowed(peer.name, pages)
            by_lease: dict[int, list[int]] = {}
            for page in pages:
                del peer.due[page]
                by_lease.setdefault(peer.lease_of.pop(page), []).append(page - peer.first)
            if not peer.gone:
                returned += [
                    Lease(id, peer.epoch, peer.name, self._device, tuple(sorted(part)))
                    for id, part in by_lease.items()
                ]
            elif not peer.lease_of:
                self._vm.detach(peer.first)
                self._peers.remove(peer)
        return returned

    def validate(self) -> None:
        """Raises BrokenPromise unless ledger, holders and leases agree on every borrowed page."""
        borrowed: dict[str, int] = {}
        for peer in self._peers:
            borrowed[peer.name] = borrowed.get(peer.name, 0) + len(peer.lease_of)
            free = {page for first, n in peer.unused.runs() for page in range(first, first + n)}
            for page in peer.lease_of:
                holder, holders = self._holders.get(page), self._pool.ledger.holders.of(page)
                if self._pool.ledger.owner_of(page) != peer.name:
                    raise BrokenPromise(f"page {page} is not {peer.name}'s in the ledger")
                if holders != (() if holder is None else (holder,)):
                    raise BrokenPromise(f"page {page} is held by {holders}, not {holder}")
                if (page in free) != (not holders and page not in peer.due):
                    raise BrokenPromise(f"page {page} is unused, or due, and held by {holders}")
        for name, n in borrowed.items():
            if self._pool.ledger.borrowed[name] != n:
                raise BrokenPromise(f"leases of {name} have {n} pages, the ledger other")
        if sum(borrowed.values()) != self._pool.ledger.borrowed.total():
            raise BrokenPromise("the ledger has borrowed pages that no lease has")

    def _peer(self, name: str, epoch: int | None = None) -> _Peer | None:
        for peer in self._peers:
            if peer.name == name and not peer.gone and epoch in (None, peer.epoch):
                return peer
        return None

    def _ask_back(self, peer: _Peer, pages: list[int]) -> tuple[BorrowedPage, ...]:
        peer.due.update(dict.fromkeys(pages))
        unused = peer.unused.pop(len(peer.unused))
        peer.unused.add([page for page in unused if page not in peer.due])
        return tuple(self._in_use(pages))

    def _in_use(self, pages: Iterable[int]) -> Iterator[BorrowedPage]:
        held = self._holders
        return (BorrowedPage(page, held[page]) for page in pages if page in held)

    def _pop_unused(self, n: int) -> list[tuple[_Peer, list[int]]]:
        """Remove `n` unused pages, which there are, of one lender if one has as many."""
        for peer in self._peers:
            if len(peer.unused) >= n:
                return [(peer, peer.unused.pop(n))]
        popped: list[tuple[_Peer, list[int]]] = []
        for peer in self._peers:
            pages = peer.unused.pop(n)
            popped.append((peer, pages))
            n -= len(pages)
        return popped
