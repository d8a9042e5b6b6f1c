"""Messages about pages that one worker lends to another.

The server introduces two workers (`MeetPeerMsg`), passes on what they send to each other about
leases (`LeaseMsg`), and takes their reports on each other (`PeerReportMsg`).
"""

from __future__ import annotations

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
    """Introduce to a worker another device's worker, with which pages may be lent."""

    peer: str
    epoch: int
    address: str
    """Address at which the peer gives its memory."""


class PeerEndedMsg(WorkerMessage, frozen=True):
    """Tell a worker that a peer's process has ended, and has been reaped."""

    peer: str
    epoch: int


class LeaseMsg(WorkerMessage, frozen=True):
    """Message from lender to borrower, or back; the server passes it on, in order."""

    kind: Literal["lent", "asked back", "returned"]
    lease: Lease

    @classmethod
    def of(cls, event: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent) -> LeaseMsg:
        """Wrap what a device has to say about a lease."""
        return cls(_LEASE_KINDS[type(event)], event.lease)

    @property
    def event(self) -> PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent:
        """The event for the device that receives it."""
        match self.kind:
            case "lent":
                return PagesLentEvent(self.lease)
            case "asked back":
                return PagesRecalledEvent(self.lease)
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

    `met`: pages can be lent between them. `overdue`: it has not returned pages in time and has to
    end. `released`: it has ended, and nothing of its memory is mapped here any more.
    """

    kind: Literal["met", "overdue", "released"]
    peer: str
    epoch: int


def lending_message(event: LendingMessage) -> LeaseMsg | PeerReportMsg:
    """Wrap what a device sends about lending."""
    match event:
        case PeerMetReport():
            return PeerReportMsg("met", event.peer, event.epoch)
        case PeerOverdueReport():
            return PeerReportMsg("overdue", event.peer, event.epoch)
        case PeerReleasedReport():
            return PeerReportMsg("released", event.peer, event.epoch)
        case _:
            return LeaseMsg.of(event)
