"""Define leases of pages that one device lends to another, and their events and reports.

Sent between the loops of lender and borrower through the controller (`cluster.lending`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True, slots=True)
class Lease:
    """Pages of `lender` that `borrower` may use, until it returns them or its process ends.

    Pages are recalled and returned by a `part` of a lease: the same lease with fewer pages.
    """

    id: int
    """Number chosen by the lender; never reused."""
    epoch: int
    """Generation of the pair of processes: the controller increments it whenever one of the two is
    replaced. Messages of an earlier epoch are void."""
    lender: str
    borrower: str
    pages: tuple[int, ...]
    """Page numbers of the lender's pool."""

    def part(self, pages: Sequence[int]) -> Lease:
        """Return the same lease with only `pages`."""
        return replace(self, pages=tuple(pages))


@dataclass(frozen=True, slots=True)
class PagesLentEvent:
    """Lender to borrower: these pages are lent."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class PagesRecalledEvent:
    """Lender to borrower: return these pages."""

    lease: Lease
    seconds: float = inf
    """Time in which they are to be returned; inf: unknown."""


@dataclass(frozen=True, slots=True)
class PagesReturnedEvent:
    """Borrower to lender: these pages are unmapped and returned."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class PeerMetEvent:
    """Another device's process has started; its `n_pages` pages can be mapped here."""

    peer: str
    epoch: int
    n_pages: int


@dataclass(frozen=True, slots=True)
class PeerGoneEvent:
    """Another device's process has ended: pages lent to it are free; pages borrowed from it must be
    released."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerMetReport:
    """To the controller: pages can be lent between this device and the peer."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerOverdueReport:
    """To the controller: the peer has not returned pages in time; kill its process."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerReleasedReport:
    """To the controller: no memory of the peer, which has ended, is mapped here any more."""

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
"""Messages that a device sends about leases: the first three to another device, the others to the
controller."""
