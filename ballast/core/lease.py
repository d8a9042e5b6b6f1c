"""Pages lent from one device to another: what lender and borrower speak of."""

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
