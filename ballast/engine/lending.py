"""What a device lends to others and borrows from them, as its loop hears and says it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import DeviceError, Unavailable
from ballast.core.lease import (
    Lease,
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
    PeerMetEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)
from ballast.memory.lending.borrower import Borrower
from ballast.memory.lending.lender import Lender
from ballast.memory.pool import Pool
from ballast.memory.vm import Exported

log = logging.getLogger(__name__)

Heard = PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent | PeerMetEvent | PeerGoneEvent
"""Events of other devices."""


class Lending:
    """Used by the loop's thread, but for what says otherwise; what it `say`s must not wait for
    anything."""

    def __init__(self, pool: Pool, borrower: Borrower, device: str) -> None:
        self.borrower = borrower
        self.send: Callable[[LendingMessage], None] = _send_nowhere
        self.exports: dict[tuple[str, int], Exported] = {}
        """By peer and epoch: put in by whoever has fetched it, before `PeerMetEvent`."""
        self.opened: dict[tuple[str, int, int], tuple[Exported, ...]] = {}
        """By lender, epoch and lease, of a GPU: stored before `PagesLentEvent` is posted."""
        self.offered: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """By borrower, epoch and lease, pages of which none has come back: those that a GPU's
        borrower may fetch. From any thread."""
        self.lent: dict[str, int] = {}
        """Pages by borrower; replaced, never changed, like what follows."""
        self.borrowed: dict[str, int] = {}
        """By lender."""
        self.news = ChangeCounter()
        """Grows with what a policy should be asked about."""
        self.alone = True
        """Nothing was ever heard of another device."""
        self.next: float | None = None
        """When `check` is to be called."""
        self._lender = Lender(
            pool, device, lambda peer, epoch: self.send(PeerOverdueReport(peer, epoch))
        )
        self._over: dict[str, int] = {}
        """The last epoch of each peer that is known to be over."""
        self._left: set[tuple[str, int]] = set()
        """Peers that are gone and of which something may be mapped."""

    @property
    def recalled(self) -> int:
        """Pages that were asked back and have not come."""
        return 0 if self.alone else self._lender.recalled()

    @property
    def awaiting(self) -> bool:
        """Whether there are any."""
        return self.recalled > 0

    def standing(self) -> tuple[tuple[str, int], ...]:
        """(borrower, pages lent to it that were not asked back), borrowers of none left out."""
        left = ((name, n - self._lender.recalled(name)) for name, n in self.lent.items())
        return tuple((name, n) for name, n in left if n)

    def awaits(self, peer: str) -> bool:
        """Whether some of them are with that peer."""
        return self._lender.recalled(peer) > 0

    def handle(self, event: Heard) -> None:
        """Take in what another device sent, or that it is there or gone; it is news if pages came
        free or can be borrowed."""
        self.alone = more = False
        match event:
            case PeerMetEvent():
                self._meet(event)
            case PeerGoneEvent(peer, epoch):
                more = self._gone(peer, epoch)
            case PagesLentEvent(lease):
                opened = self.opened.pop((lease.lender, lease.epoch, lease.id), ())
                more = _log_refusal(self.borrower.accept(lease, opened))
            case PagesRecalledEvent(lease):
                self.borrower.recall(lease)
            case PagesReturnedEvent(lease):
                self.offered.pop((lease.borrower, lease.epoch, lease.id), None)
                more = _log_refusal(self._lender.returned(lease))
        self._count()
        self.news.n += more

    def lend(self, peer: str, pages: int) -> Lease | str:
        """Free pages for a peer; why not, if so."""
        try:
            lease = self._lender.lend(peer, pages)
        except Unavailable as error:
            return str(error)
        if isinstance(lease, Short):
            return f"short of {lease.pages} pages"
        self._count()
        self.news.n += 1
        self.offered[peer, lease.epoch, lease.id] = lease.pages
        self.send(PagesLentEvent(lease))
        return lease

    def recall(self, peer: str | None, pages: int | None, due: float) -> int:
        """Ask for so many pages, or all, of a peer, or of all; how many are out of these.

        What was lent last is asked back first.
        """
        n_recalled = 0
        for name in list(self.lent) if peer is None else [peer]:
            for lease in reversed(self._lender.leases(name)):
                left = len(lease.pages) if pages is None else pages - n_recalled
                part = self._lender.recall(lease.part(lease.pages[-left:] if left else ()), due)
                if part is not None:
                    n_recalled += len(part.pages)
                    self.send(PagesRecalledEvent(part))
        if n_recalled:
            self.next = due if self.next is None else min(self.next, due)
        return n_recalled

    def give_back(self, lender: str, pages: int) -> int:
        """Return up to so many unused pages to a lender by the next `answer`; how many."""
        return self.borrower.offer_back(lender, pages)

    def check(self, now: float) -> None:
        """Have those killed that are late."""
        if self.next is not None and now >= self.next:
            # In virtual time it is called at the very moment.
            soonest = self._lender.check(math.nextafter(now, math.inf))
            self.next = soonest if self.awaiting and soonest < math.inf else None

    def answer(self) -> None:
        """Say what has been returned, and which dead peers' memory is let go of."""
        returned = self.borrower.settle()
        for part in returned:
            self.send(PagesReturnedEvent(part))
        if returned or self._left:
            self._count()
        for peer, epoch in sorted(self._left):
            if not self.borrower.knows(peer, epoch):
                self._left.discard((peer, epoch))
                self.send(PeerReleasedReport(peer, epoch))

    def validate(self) -> None:
        """Raises BrokenPromise unless the ledger shows what was lent and borrowed."""
        self._lender.validate()
        self.borrower.validate()

    def _meet(self, event: PeerMetEvent) -> None:
        exported = self.exports.pop((event.peer, event.epoch))
        try:
            if event.epoch <= self._over.get(event.peer, -1):
                raise DeviceError("attach", "its process has ended")
            self.borrower.meet(event.peer, event.epoch, exported)
        except DeviceError as error:
            log.warning("%s cannot be lent to nor borrowed from: %s", event.peer, error)
            exported.discard()
            return
        self._lender.meet(event.peer, event.epoch)
        self.send(PeerMetReport(event.peer, event.epoch))

    def _gone(self, peer: str, epoch: int) -> bool:
        self._over[peer] = max(epoch, self._over.get(peer, -1))
        for key in [key for key in self.offered if key[:2] == (peer, epoch)]:
            del self.offered[key]
        freed = self._lender.gone(peer, epoch)
        self.borrower.gone(peer, epoch)
        self._left.add((peer, epoch))
        return freed > 0

    def _count(self) -> None:
        self.lent, self.borrowed = self._lender.lent(), self.borrower.borrowed()


def _log_refusal(refused: str | None) -> bool:
    if refused is not None:
        log.warning("%s", refused)
    return refused is None


def _send_nowhere(message: LendingMessage) -> None:
    """In simulations nobody listens."""
