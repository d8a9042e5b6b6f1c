"""The lender's side of lending pages to other devices' processes: leases, recalls, deadlines.

Bookkeeping only: what is to be said to the borrower is returned, what it said is passed in.
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
"""Of all pages lent, in the lender's ledger; their holder is the borrowing device."""


@dataclass(slots=True)
class _Peer:
    epoch: int
    leases: dict[int, dict[int, float]] = field(default_factory=dict)
    """Lease -> page -> when it must be back; infinite unless it was recalled."""
    condemned: bool = False


class Lender:
    """All calls from one thread, that of the pool."""

    def __init__(self, pool: Pool, device: str, kill: Callable[[str, int], None]) -> None:
        """`kill(peer, epoch)` asks whoever supervises to end a borrower's process, and returns at
        once; `gone` is to be called when it has ended."""
        self._pool, self._device, self._kill = pool, device, kill
        self._peers: dict[str, _Peer] = {}
        self._epochs: dict[str, int] = {}
        self._next = 0

    def meet(self, peer: str, epoch: int) -> None:
        """A process that pages can be lent to. Its predecessor, if any, is `gone`."""
        if peer in self._peers or epoch <= self._epochs.get(peer, -1):
            raise BrokenPromise(
                f"{self._device} meets {peer} in epoch {epoch}: it is there already"
            )
        self._peers[peer] = _Peer(epoch)
        self._epochs[peer] = epoch

    def lend(self, peer: str, n: int) -> Lease | Short:
        """`n` free pages for `peer`, or none; their contents are whatever they were.

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
        """What `peer` has not returned, oldest first."""
        found = self._peers.get(peer)
        if found is None:
            return ()
        return tuple(
            Lease(id, found.epoch, self._device, peer, tuple(pages))
            for id, pages in found.leases.items()
        )

    def recall(self, part: Lease, due: float) -> Lease | None:
        """Ask pages of a lease back by `due`, or by when they were asked for if that is sooner.

        What to tell the borrower: pages that are back already are left out; None if all are.
        """
        pages = self._out(part)
        still = [page for page in part.pages if page in pages]
        for page in still:
            pages[page] = min(due, pages[page])
        return part.part(still) if still else None

    def returned(self, part: Lease) -> str | None:
        """The borrower has unmapped pages, asked for or not: they are free.

        Why that is refused, wholly: nothing has changed then.
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
        """Have borrowers killed that were to return pages before `now`; when to call this again
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
        """The borrower's process has ended, and its mappings with it: what it had is free.

        How many pages that was; 0 if it was known.
        """
        found = self._peers.get(peer)
        if found is None or found.epoch != epoch:
            return 0
        del self._peers[peer]
        pages = [page for lease in found.leases.values() for page in lease]
        self._free(peer, pages)
        return len(pages)

    def recalled(self, peer: str | None = None) -> int:
        """Pages asked back, of one peer or of all, and not yet here."""
        found = (p for name, p in self._peers.items() if peer in (None, name))
        leases = (lease for p in found for lease in p.leases.values())
        return sum(due < math.inf for lease in leases for due in lease.values())

    def lent(self) -> dict[str, int]:
        """Pages that are out, by peer."""
        told = {name: sum(map(len, p.leases.values())) for name, p in self._peers.items()}
        return {name: n for name, n in told.items() if n}

    def validate(self) -> None:
        """Raises BrokenPromise unless the ledger shows just these pages as lent."""
        told: dict[str, int] = {}
        for name, peer in self._peers.items():
            for page in (page for lease in peer.leases.values() for page in lease):
                if (self._pool.ledger.owner_of(page), self._pool.ledger.holders_of(page)) != (
                    OWNER,
                    (name,),
                ):
                    raise BrokenPromise(f"page {page} is not lent to {name} alone")
                told[name] = told.get(name, 0) + 1
        if told != self._pool.ledger.held_of(OWNER) or sum(
            told.values()
        ) != self._pool.ledger.owned(OWNER):
            raise BrokenPromise(f"leases say {told}, the ledger {self._pool.ledger.held_of(OWNER)}")

    def _out(self, part: Lease) -> dict[int, float]:
        """Pages of the lease that are not back."""
        found = self._peers.get(part.borrower)
        if found is None or found.epoch != part.epoch:
            return {}
        return found.leases.get(part.id, {})

    def _free(self, peer: str, pages: list[int] | tuple[int, ...]) -> None:
        self._pool.remove_holder(OWNER, pages, peer)
        self._pool.give_back(OWNER, pages)
