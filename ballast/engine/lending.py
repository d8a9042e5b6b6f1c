"""Handle leases in a device's loop: lend and recall pages, borrow and return pages.

Part of `DeviceState`; joins `Lender` and `Borrower` of `ballast.memory.lending` to the loop's
events and messages. Messages to other devices go through `send` only: no sockets are used here.
"""

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
"""Events about other devices and their leases."""


class Lending:
    """Lending state of one device. Used by the loop's thread, except where noted; `send` must not
    block."""

    def __init__(self, pool: Pool, borrower: Borrower, device: str) -> None:
        self.borrower = borrower
        self.send: Callable[[LendingMessage], None] = _send_nowhere
        self.bytes_per_second: float | None = None
        """Rate at which passes read KV on borrowed pages; None: that of the link to the host."""
        self.exports: dict[tuple[str, int], Exported] = {}
        """Peers' exported memory by (peer, epoch); set before `PeerMetEvent` is posted."""
        self.opened: dict[tuple[str, int, int], tuple[Exported, ...]] = {}
        """Exported pages of a GPU's leases by (lender, epoch, lease); set before `PagesLentEvent`
        is posted."""
        self.offered: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """Pages of leases of which no page has been returned, by (borrower, epoch, lease): those
        that a GPU's borrower may fetch. Read by any thread."""
        self.lent: dict[str, int] = {}
        """Pages lent, by borrower. The dict is replaced, never changed; so is `borrowed`."""
        self.borrowed: dict[str, int] = {}
        """Pages borrowed, by lender."""
        self.news = ChangeCounter()
        """Counts changes after which a policy should decide again."""
        self.alone = True
        """Whether no event of another device has ever been handled."""
        self.next: float | None = None
        """Time on the device's clock at which `check` must be called; None: no recall is due."""
        self._lender = Lender(
            pool, device, lambda peer, epoch: self.send(PeerOverdueReport(peer, epoch))
        )
        self._over: dict[str, int] = {}
        """Last epoch of each peer whose process has ended."""
        self._left: set[tuple[str, int]] = set()
        """(peer, epoch) of ended processes whose pages may still be mapped here."""

    @property
    def recalled(self) -> int:
        """Pages recalled and not yet returned."""
        return 0 if self.alone else self._lender.recalled()

    @property
    def awaiting(self) -> bool:
        """Whether any recalled page has not been returned yet."""
        return self.recalled > 0

    def standing(self) -> tuple[tuple[str, int], ...]:
        """Return (borrower, lent pages that are not recalled), without borrowers that have none."""
        left = ((name, n - self._lender.recalled(name)) for name, n in self.lent.items())
        return tuple((name, n) for name, n in left if n)

    def awaits(self, peer: str) -> bool:
        """Return whether recalled pages have not been returned by `peer` yet."""
        return self._lender.recalled(peer) > 0

    def handle(self, event: Heard) -> None:
        """Handle an event about another device or a lease. Counts as news if pages became free or
        can be borrowed."""
        self.alone = more = False
        match event:
            case PeerMetEvent():
                self._meet(event)
            case PeerGoneEvent(peer, epoch):
                more = self._gone(peer, epoch)
            case PagesLentEvent(lease):
                opened = self.opened.pop((lease.lender, lease.epoch, lease.id), ())
                more = _log_refusal(self.borrower.accept(lease, opened))
            case PagesRecalledEvent(lease, _):
                self.borrower.recall(lease)
            case PagesReturnedEvent(lease):
                self.offered.pop((lease.borrower, lease.epoch, lease.id), None)
                more = _log_refusal(self._lender.returned(lease))
        self._count()
        self.news.n += more

    def lend(self, peer: str, pages: int) -> Lease | str:
        """Lend free pages to a peer; return the lease, or the reason of a refusal."""
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

    def recall(self, peer: str | None, pages: int | None, now: float, seconds: float) -> int:
        """Recall `pages` (None: all) from `peer` (None: all peers) within `seconds` from `now`; the
        latest leases first. Returns the number of pages recalled.
        """
        due, n_recalled = now + seconds, 0
        for name in list(self.lent) if peer is None else [peer]:
            for lease in reversed(self._lender.leases(name)):
                left = len(lease.pages) if pages is None else pages - n_recalled
                part = self._lender.recall(lease.part(lease.pages[-left:] if left else ()), due)
                if part is not None:
                    n_recalled += len(part.pages)
                    self.send(PagesRecalledEvent(part, seconds))
        if n_recalled:
            self.next = due if self.next is None else min(self.next, due)
        return n_recalled

    def give_back(self, lender: str, pages: int) -> int:
        """Return up to `pages` unused borrowed pages to a lender with the next `answer`; returns
        their number."""
        return self.borrower.offer_back(lender, pages)

    def check(self, now: float) -> None:
        """Report borrowers that have missed a recall's deadline, to have their processes ended."""
        if self.next is not None and now >= self.next:
            # In virtual time it is called at the very moment.
            soonest = self._lender.check(math.nextafter(now, math.inf))
            self.next = soonest if self.awaiting and soonest < math.inf else None

    def answer(self) -> None:
        """Send messages about pages returned, and about ended peers whose pages are unmapped."""
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
    """Drop a message: the default where no peer is connected, as in simulations."""
