"""Record which owners use pages of others: the holders of each page.

Used by `Ledger`, which knows the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ballast.core.errors import BrokenPromise


class PageHolders:
    """Holders by page, any number of them; one that holds a page twice counts twice."""

    def __init__(self) -> None:
        self.by_page: dict[int, list[str]] = {}
        """Of pages that have some: their holders, once for each `add`, in that order."""
        self._held: dict[str, int] = {}

    def of(self, page: int) -> tuple[str, ...]:
        """Holders of the page, once for each `add`, in that order."""
        return tuple(self.by_page.get(page, ()))

    def held(self, holder: str) -> int:
        """Pages of other owners or devices that `holder` uses."""
        return self._held.get(holder, 0)

    def add(self, pages: Sequence[int], holder: str) -> None:
        """Record that `holder` uses these pages."""
        for page in pages:
            self.by_page.setdefault(page, []).append(holder)
        self._held[holder] = self._held.get(holder, 0) + len(pages)

    def remove(self, pages: Sequence[int], holder: str) -> None:
        """Undo one `add` of each page. Raises BrokenPromise, with nothing changed."""
        for page in pages:
            if holder not in self.by_page.get(page, ()):
                raise BrokenPromise(f"page {page} is not held by {holder}")
        for page in pages:
            self.by_page[page].remove(holder)
            if not self.by_page[page]:
                del self.by_page[page]
        if pages:
            self._held[holder] -= len(pages)

    def check_none(self, pages: Sequence[int]) -> None:
        """Raises BrokenPromise if one of the pages has a holder."""
        for page in pages if self.by_page else ():
            if page in self.by_page:
                raise BrokenPromise(f"page {page} is held by {self.by_page[page][0]}")

    def validate(self, owner_of: Callable[[int], str | None]) -> None:
        """Raises BrokenPromise unless all held pages have another owner, and the counts agree."""
        held: dict[str, int] = {}
        for page, holders in self.by_page.items():
            if not holders or owner_of(page) in (None, *holders):
                raise BrokenPromise(f"page {page} is held by {holders} but its owner is gone")
            for holder in holders:
                held[holder] = held.get(holder, 0) + 1
        if held != {holder: n for holder, n in self._held.items() if n}:
            raise BrokenPromise(f"held pages say {held}, the counts say {self._held}")
