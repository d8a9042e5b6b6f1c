"""Pages lent from one device to another: what lender, borrower and supervisor say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lease:
    """`pages` of device `lender` are `borrower`'s to write on, until it returns them or is gone.

    A part of a lease, the same with fewer pages, is what is asked back and what is returned.
    """

    id: int
    """The lender's; never used twice."""
    epoch: int
    """Of the acquaintance of two processes: whoever supervises them counts it up whenever one of
    the two is another. What was said in an earlier one is void."""
    lender: str
    borrower: str
    pages: tuple[int, ...]
    """By the lender's numbers."""

    def part(self, pages: Sequence[int]) -> Lease:
        return replace(self, pages=tuple(pages))


@dataclass(frozen=True, slots=True)
class PagesLentEvent:
    """Lender to borrower: these pages are yours to use."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class PagesRecalledEvent:
    """Lender to borrower: these are to be returned."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class PagesReturnedEvent:
    """Borrower to lender: these are unmapped."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class PeerMetEvent:
    """Another device's process is there, of so many pages, which can be mapped here."""

    peer: str
    epoch: int
    n_pages: int


@dataclass(frozen=True, slots=True)
class PeerGoneEvent:
    """It has ended: what it had borrowed is free, what it had lent is to be let go of."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerMetReport:
    """To the supervisor: pages can be lent between this device and the peer."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerOverdueReport:
    """To the supervisor: the peer has not returned pages in time and has to end."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerReleasedReport:
    """To the supervisor: nothing of the peer, which is gone, is mapped here any more."""

    peer: str
    epoch: int


LendingMessage = (
    PagesLentEvent
    | PagesRecalledEvent
    | PagesReturnedEvent
    | PeerMetReport
    | PeerOverdueReport
    | PeerReleasedReport
)
"""What a device has to say; the first three are for another device."""
