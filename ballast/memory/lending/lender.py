"""Lend pages of this device to other devices' processes: leases, recalls, deadlines.

The lender's side of lending, used by the engine's `Lending`. Bookkeeping only: messages to the
borrower are returned, those from it are passed in.
::

    lend ──Lease──> accept            pages are lent; not mapped here, mapped there if at all
    recall ─part──> recall            by `due` they must be back
    returned <─part── settle          unmapped there: they are ours, and free
    check ─kill─> supervisor ─> gone  no answer in time: free once the process has ended
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, Unavailable
from ballast.core.lease import Lease
from ballast.memory.pool import Pool

OWNER = "lent"
"""Owner of all lent pages in the lender's ledger; their holder is the borrowing device."""


@dataclass(slots=True)
class _Peer:
    epoch: int
    leases: dict[int, dict[int, float]] = field(default_factory=dict)
    """Deadline of each page, by lease id and page; infinite unless it was recalled."""
    condemned: bool = False


class Lender:
    """Leases of a device's pages to borrowers. All calls come from the pool's thread."""

    def __init__(self, pool: Pool, device: str, kill: Callable[[str, int], None]) -> None:
        """`kill(peer, epoch)` requests the end of a borrower's process, and returns at once; call
        `gone` when it has ended."""
        self._pool, self._device, self._kill = pool, device, kill
        self._peers: dict[str, _Peer] = {}
        self._epochs: dict[str, int] = {}
        self._next = 0

    def meet(self, peer: str, epoch: int) -> None:
        """Register a process that pages can be lent to; its predecessor, if any, is `gone`."""
        if peer in self._peers or epoch <= self._epochs.get(peer, -1):
            raise BrokenPromise(
                f"{self._device} meets {peer} in epoch {epoch}: it is there already"
            )
        self._peers[peer] = _Peer(epoch)
        self._epochs[peer] = epoch

    def lend(self, peer: str, n: int) -> Lease | Short:
        """Lease `n` free pages to `peer`, or none; their contents are undefined.

        Raises Unavailable if the peer is gone, or about to be.
        """
        found = self._peers.get(peer)
        if found is None or found.condemned:
            raise Unavailable(f"{self._device} cannot lend to {peer}: it is gone")
        if n < 1:
            raise BrokenPromise(f"{self._device} lends {n} pages")
        pages = self._pool.allocate(OWNER, n)
        if isinstance(pages, Short):
            return pages
        self._pool.add_holder(OWNER, pages, peer)
        lease = Lease(self._next, found.epoch, self._device, peer, pages)
        self._next += 1
        found.leases[lease.id] = dict.fromkeys(pages, math.inf)
        return lease

    def leases(self, peer: str) -> tuple[Lease, ...]:
        """Leases that `peer` has not returned, or what is left of them, oldest first."""
        found = self._peers.get(peer)
        if found is None:
            return ()
        return tuple(
            Lease(id, found.epoch, self._device, peer, tuple(pages))
            for id, pages in found.leases.items()
        )

    def recall(self, part: Lease, due: float) -> Lease | None:
        """Recall pages of a lease by `due`, or by an earlier recall's deadline if that is sooner.

        Returns the recall for the borrower, without pages that are back; None if all of them are.
        """
        pages = self._out(part)
        still = [page for page in part.pages if page in pages]
        for page in still:
            pages[page] = min(due, pages[page])
        return part.part(still) if still else None

    def returned(self, part: Lease) -> str | None:
        """Free pages that the borrower has unmapped, recalled or not.

        Returns why the message is refused, in which case nothing has changed; None if it is not.
        """
        found = self._peers.get(part.borrower)
        if found is None or found.epoch != part.epoch or found.condemned:
            return f"epoch {part.epoch} of {part.borrower} is over"
        pages = self._out(part)
        if len(set(part.pages)) < len(part.pages) or not pages.keys() >= set(part.pages):
            return f"not all of these pages are lent to {part.borrower} by lease {part.id}"
        for page in part.pages:
            del pages[page]
        if not pages:
            del found.leases[part.id]
        self._free(part.borrower, part.pages)
        return None

    def check(self, now: float) -> float:
        """Call `kill` for borrowers that have missed a deadline; returns the time of the next check
        (infinite: after the next recall)."""
        soonest = math.inf
        for peer, found in list(self._peers.items()):
            dues = (due for pages in found.leases.values() for due in pages.values())
            due = math.inf if found.condemned else min(dues, default=math.inf)
            if due < now:
                found.condemned = True
                self._kill(peer, found.epoch)
            else:
                soonest = min(soonest, due)
        return soonest

    def gone(self, peer: str, epoch: int) -> int:
        """Free all pages of a borrower whose process, and with it its mappings, has ended.

        Returns their number; 0 if that was known before.
        """
        found = self._peers.get(peer)
        if found is None or found.epoch != epoch:
            return 0
        del self._peers[peer]
        pages = [page for lease in found.leases.values() for page in lease]
        self._free(peer, pages)
        return len(pages)

    def recalled(self, peer: str | None = None) -> int:
        """Number of pages recalled from one peer, or from all, and not yet returned."""
        found = (p for name, p in self._peers.items() if peer in (None, name))
        leases = (lease for p in found for lease in p.leases.values())
        return sum(due < math.inf for lease in leases for due in lease.values())

    def lent(self) -> dict[str, int]:
        """Number of lent pages, by borrower."""
        pages_lent = {name: sum(map(len, p.leases.values())) for name, p in self._peers.items()}
        return {name: n for name, n in pages_lent.items() if n}

    def validate(self) -> None:
        """Raises BrokenPromise unless the ledger shows just these pages as lent."""
        ledger, pages_lent = self._pool.ledger, dict[str, int]()
        for name, peer in self._peers.items():
            for page in (page for lease in peer.leases.values() for page in lease):
                if (ledger.owner_of(page), ledger.holders.of(page)) != (OWNER, (name,)):
                    raise BrokenPromise(f"page {page} is not lent to {name} alone")
                pages_lent[name] = pages_lent.get(name, 0) + 1
        held, owned = ledger.held_of(OWNER), ledger.owned(OWNER)
        if pages_lent != held or sum(pages_lent.values()) != owned:
            raise BrokenPromise(f"leases say {pages_lent}, the ledger {held}")

    def _out(self, part: Lease) -> dict[int, float]:
        """Return the pages of the lease that have not been returned, with their deadlines."""
        found = self._peers.get(part.borrower)
        if found is None or found.epoch != part.epoch:
            return {}
        return found.leases.get(part.id, {})

    def _free(self, peer: str, pages: list[int] | tuple[int, ...]) -> None:
        self._pool.remove_holder(OWNER, pages, peer)
        self._pool.give_back(OWNER, pages)
