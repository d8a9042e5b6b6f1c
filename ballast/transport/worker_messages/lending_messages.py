"""Define the messages about pages that one worker lends to another.

The server introduces two workers (`MeetPeerMsg`), forwards their messages about leases
(`LeaseMsg`), and receives their reports on each other (`PeerReportMsg`). Used by
`control.device_leases` in the server and `LendingPeers` in each worker.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from ballast.core.lease import (
    Lease,
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)
from ballast.transport.worker_messages.message import WorkerMessage


class MeetPeerMsg(WorkerMessage, frozen=True):
    """Introduce another device's worker to a worker that may lend to it or borrow from it."""

    peer: str
    epoch: int
    address: str
    """Address at which the peer serves descriptors of its memory."""


class PeerEndedMsg(WorkerMessage, frozen=True):
    """Notify a worker that a peer's process has ended and has been reaped."""

    peer: str
    epoch: int


class LeaseMsg(WorkerMessage, frozen=True):
    """Message about a lease between lender and borrower; the server forwards these in order."""

    kind: Literal["lent", "asked back", "returned"]
    lease: Lease
    seconds: float = inf
    """Time in which recalled pages are to be returned."""

    @classmethod
    def of(cls, event: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent) -> LeaseMsg:
        """Wrap a device's event about a lease."""
        seconds = event.seconds if isinstance(event, PagesRecalledEvent) else inf
        return cls(_LEASE_KINDS[type(event)], event.lease, seconds)

    @property
    def event(self) -> PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent:
        """The event for the device that receives it."""
        match self.kind:
            case "lent":
                return PagesLentEvent(self.lease)
            case "asked back":
                return PagesRecalledEvent(self.lease, self.seconds)
            case "returned":
                return PagesReturnedEvent(self.lease)


_LEASE_KINDS: dict[
    type[PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent],
    Literal["lent", "asked back", "returned"],
] = {
    PagesLentEvent: "lent",
    PagesRecalledEvent: "asked back",
    PagesReturnedEvent: "returned",
}


class PeerReportMsg(WorkerMessage, frozen=True):
    """Report to the server about another device's worker.

    `met`: pages can be lent between them. `overdue`: the peer has not returned pages in time and
    must be killed. `released`: the peer has ended, and none of its memory is mapped here any more.
    """

    kind: Literal["met", "overdue", "released"]
    peer: str
    epoch: int

    @property
    def report(self) -> PeerMetReport | PeerOverdueReport | PeerReleasedReport:
        """The device's report."""
        return _REPORTS[self.kind](self.peer, self.epoch)


_REPORTS: dict[str, type[PeerMetReport | PeerOverdueReport | PeerReleasedReport]] = {
    "met": PeerMetReport,
    "overdue": PeerOverdueReport,
    "released": PeerReleasedReport,
}


def lending_message(event: LendingMessage) -> LeaseMsg | PeerReportMsg:
    """Wrap a device's message about lending."""
    match event:
        case PeerMetReport():
            return PeerReportMsg("met", event.peer, event.epoch)
        case PeerOverdueReport():
            return PeerReportMsg("overdue", event.peer, event.epoch)
        case PeerReleasedReport():
            return PeerReportMsg("released", event.peer, event.epoch)
        case _:
            return LeaseMsg.of(event)
