"""Queue items of several owners (API keys) in round-robin order, within bounds.

Used by `live.grammar_cache` and `server.http.fair_turns`, so that no owner waits for all items
of another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Owners take turns; items of one owner stay in order. Not safe to use from several threads."""

    def __init__(self, most_each: int, most: int) -> None:
        """`most_each`, `most`: bounds of the items of one owner, and of all owners together."""
        self._most_each, self._most = most_each, most
        self._items: OrderedDict[str, deque[T]] = OrderedDict()
        """Items by owner, in the order of turns; owners without items are absent."""

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def full(self, owner: str) -> str | None:
        """Return why `owner` cannot add an item now (the bound that is reached); None: it can."""
        if len(self._items.get(owner, ())) >= self._most_each:
            return f"{self._most_each} of the same API key wait already"
        return f"{self._most} wait already" if len(self) >= self._most else None

    def put(self, owner: str, item: T) -> str | None:
        """Append an item unless the queue is `full`; return the reason if it was not appended."""
        refusal = self.full(owner)
        if refusal is None:
            self._items.setdefault(owner, deque()).append(item)
        return refusal

    def take(self, may: Callable[[T], bool] = lambda item: True) -> T | None:
        """Remove and return the first item of the next owner whose first item satisfies `may`; that
        owner's next turn comes last. None: there is no such item."""
        for owner, items in self._items.items():
            if may(items[0]):
                item = items.popleft()
                del self._items[owner]
                if items:
                    self._items[owner] = items
                return item
        return None

    def remove(self, owner: str, item: T) -> None:
        """Remove an item that is in the queue; raises KeyError or ValueError where it is not."""
        items = self._items[owner]
        items.remove(item)
        if not items:
            del self._items[owner]
