"""Count the pages that are reserved for owners before they allocate them.

Used by `Ledger`, which knows what is free and what each owner has.
"""

from __future__ import annotations

from collections.abc import Callable

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise


class PageReservations:
    """Promises and guarantees by owner. An allocation uses a promise up; a guarantee stands, and
    reserves, beside the promise, what its owner lacks of it."""

    def __init__(self, owned: Callable[[str], int]) -> None:
        """`owned`: the pages that an owner has."""
        self.promised = 0
        """Pages promised to all owners together."""
        self._owned = owned
        self._promises: dict[str, int] = {}
        self._floors: dict[str, int] = {}

    def promised_to(self, owner: str) -> int:
        return self._promises.get(owner, 0)

    def guarantee(self, owner: str, n: int) -> bool:
        """Keep what `owner` lacks of `n` pages from all others, for as long as this stands; pages
        that others have stay theirs until they free them. 0: no longer. Returns whether it is
        news."""
        if n == self._floors.get(owner, 0):
            return False
        if n:
            self._floors[owner] = n
        else:
            del self._floors[owner]
        return True

    def kept_for(self, owner: str) -> int:
        """Pages that `owner` lacks of those guaranteed to it; promises are beside these."""
        floor = self._floors.get(owner, 0)
        return max(0, floor - self._owned(owner)) if floor else 0

    @property
    def kept(self) -> int:
        """Pages that all owners together lack of those guaranteed to them."""
        return sum(map(self.kept_for, self._floors)) if self._floors else 0

    def of_others(self, owner: str) -> int:
        """Pages promised or guaranteed to others."""
        others = self.promised - self._promises.get(owner, 0)
        return others + self.kept - self.kept_for(owner) if self._floors else others

    def promise(self, owner: str, n: int, spare: int) -> Short | None:
        """Reserve `n` more pages for `owner` out of `spare` ones that are reserved for nobody."""
        if n < 0:
            raise BrokenPromise(f"promised {n} pages to {owner}")
        if n > max(0, spare):
            return Short(n - max(0, spare))
        if n:
            self.promised += n
            self._promises[owner] = self._promises.get(owner, 0) + n
        return None

    def cancel(self, owner: str) -> int:
        """Cancel what is promised to `owner`; returns the number of pages."""
        n = self._promises.pop(owner, 0)
        self.promised -= n
        return n

    def use(self, owner: str, n: int) -> None:
        """Use up to `n` of the pages promised to `owner`: they are allocated."""
        if used := min(n, self._promises.get(owner, 0)):
            self._promises[owner] -= used
            self.promised -= used
            if not self._promises[owner]:
                del self._promises[owner]

    def validate(self, room: int) -> None:
        """Raises BrokenPromise unless the promises add up, to no more than `room` pages."""
        counts = self._promises.values()
        if self.promised != sum(counts) or min(counts, default=1) <= 0:
            raise BrokenPromise(f"promised {self.promised}, by owner {self._promises}")
        if self.promised > room:
            raise BrokenPromise(f"promised {self.promised} of {room}")
