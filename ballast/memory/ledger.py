"""Record the owner and the holders of each page of a device, and what is reserved for each owner.

Changed by `Pool` only. Pure bookkeeping: no memory is touched. Invariants, checked by `validate`:

- every page is free, owned by one owner, or reclaiming (given back, its last use not yet over);
- `free + reclaiming + sum(owned)` is the number of pages;
- `promised <= free + reclaiming`;
- what an owner lacks of the pages *guaranteed* to it is kept for it, beside its promise, as far as
  pages are free (`PageReservations`);
- only an owned page can have holders, any number; owner and holder differ, and the owner cannot
  free the page until the last of them has unmapped it;
- pages *borrowed* from another device have numbers of their own, above those of this device's, and
  count in none of the above: the other device owns them, owners of this one hold them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.memory.page_holders import PageHolders
from ballast.memory.page_reservations import PageReservations

_FREE = -1
_AWAY = -2
"""A page of another device that is not borrowed, or no page."""
# A page of owner k holds the code 2k; once reclaiming, 2k + 1.


class Ledger:
    """Owners, holders and reservations; each change is checked, whole or not made, and O(1) a
    page."""

    def __init__(self, n_pages: int) -> None:
        self.total = n_pages
        self.free = n_pages
        self.reclaiming = 0
        self.borrowed = Counter[str]()
        """Pages of other devices that are here, by device."""
        self.holders = PageHolders()
        self.reservations = PageReservations(self.owned)
        self._codes = array("i", [_FREE]) * n_pages
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self._owned: list[int] = []
        self._reclaimed: list[int] = []

    def owned(self, owner: str) -> int:
        """Pages of `owner`, those with holders included, reclaiming ones not."""
        key = self._ids.get(owner)
        return 0 if key is None else self._owned[key]

    def reclaiming_of(self, owner: str) -> int:
        """Pages that `owner` gave back and whose last use is not over."""
        key = self._ids.get(owner)
        return 0 if key is None else self._reclaimed[key]

    def owners(self) -> dict[str, int]:
        """Return pages by owner, without owners of none; the sum is total - free - reclaiming."""
        return {name: n for name, n in zip(self._names, self._owned, strict=True) if n}

    def owner_of(self, page: int) -> str | None:
        """Return a page's owner, for a borrowed page its device; None: it is free, reclaiming, or
        another device's and not borrowed."""
        code = self._codes[page] if page < len(self._codes) else _AWAY
        return None if code < 0 or code & 1 else self._names[code >> 1]

    def held_of(self, owner: str) -> dict[str, int]:
        """Number of pages of `owner` that others hold, by holder."""
        found: dict[str, int] = {}
        for page, holders in self.holders.by_page.items():
            if self.owner_of(page) == owner:
                for holder in holders:
                    found[holder] = found.get(holder, 0) + 1
        return found

    def available(self, owner: str) -> int:
        """Free pages that are neither promised nor guaranteed to others."""
        return max(0, self.free - self.reservations.of_others(owner))

    @property
    def spare(self) -> int:
        """Pages, free or reclaiming, that are neither promised nor guaranteed; negative where
        others still have what has been guaranteed since."""
        reserved = self.reservations
        return self.free + self.reclaiming - reserved.promised - reserved.kept

    def promise(self, owner: str, n: int) -> Short | None:
        """Reserve `n` more pages for `owner`, out of what is free or will be."""
        return self.reservations.promise(owner, n, self.spare)

    def allocate(self, owner: str, pages: Sequence[int]) -> None:
        """Give free pages to `owner`: those guaranteed to it first, then those promised."""
        _check(self._codes, self.total, pages, _FREE, "is not free")
        if len(pages) > self.available(owner):
            raise BrokenPromise(f"{owner} allocates {len(pages)} pages, some promised to others")
        key = self._key(owner)
        promised = max(0, len(pages) - self.reservations.kept_for(owner))
        _write(self._codes, pages, 2 * key)
        self._owned[key] += len(pages)
        self.free -= len(pages)
        self.reservations.use(owner, promised)

    def give_back(self, owner: str, pages: Sequence[int]) -> None:
        """Mark the owner's pages as reclaiming, until `freed`."""
        key = self._check_owned(owner, pages)
        self.holders.check_none(pages)
        _write(self._codes, pages, 2 * key + 1)
        self._owned[key] -= len(pages)
        self._reclaimed[key] += len(pages)
        self.reclaiming += len(pages)

    def freed(self, owner: str, pages: Sequence[int]) -> None:
        """Mark reclaiming pages as free: their last use is over."""
        key = self._key(owner)
        _check(self._codes, self.total, pages, 2 * key + 1, f"is not reclaiming from {owner}")
        _write(self._codes, pages, _FREE)
        self._reclaimed[key] -= len(pages)
        self.reclaiming -= len(pages)
        self.free += len(pages)

    def hand_over(self, source: str, target: str, pages: Sequence[int]) -> None:
        """Change the owner of pages, without freeing them in between."""
        source_key = self._check_owned(source, pages)
        self.holders.check_none(pages)
        key = self._key(target)
        _write(self._codes, pages, 2 * key)
        self._owned[source_key] -= len(pages)
        self._owned[key] += len(pages)

    def add_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Record that `holder` uses pages of `owner`: they cannot be freed until it is removed."""
        self._check_owned(owner, pages, attached=True)
        if holder == owner:
            raise BrokenPromise(f"{owner} holds its own pages")
        self.holders.add(pages, holder)

    def remove_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Undo one `add_holder` of each page; the caller knows that the holder has unmapped it."""
        self._check_owned(owner, pages, attached=True)
        self.holders.remove(pages, holder)

    def borrow(self, peer: str, pages: Sequence[int]) -> None:
        """Add pages of another device: `peer` owns them, and owners of this one can hold them."""
        if pages and min(pages) < self.total:
            raise BrokenPromise(f"borrowed from {peer} a page of our own")
        if pages and (more := max(pages) + 1 - len(self._codes)) > 0:
            self._codes.extend(array("i", [_AWAY]) * more)
        _check(self._codes, len(self._codes), pages, _AWAY, "is borrowed already")
        _write(self._codes, pages, 2 * self._key(peer))
        self.borrowed[peer] += len(pages)

    def return_borrowed(self, peer: str, pages: Sequence[int]) -> None:
        """Remove borrowed pages from the ledger; they must have no holder here."""
        if pages and min(pages) < self.total:
            raise BrokenPromise(f"restored to {peer} a page of our own")
        self._check_owned(peer, pages, attached=True)
        self.holders.check_none(pages)
        _write(self._codes, pages, _AWAY)
        self.borrowed[peer] -= len(pages)

    def free_mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(total,) bool: which pages are free."""
        return np.equal(np.frombuffer(self._codes, dtype=np.int32)[: self.total], _FREE)

    def validate(self) -> None:
        """Raises BrokenPromise unless the counts follow from the pages. One vectorised pass."""
        codes, others = np.split(np.frombuffer(self._codes, dtype=np.int32), [self.total])
        counts = np.bincount(codes + 1, minlength=2 * len(self._names) + 1)
        found = (int(counts[0]), counts[1::2].tolist(), counts[2::2].tolist())
        if found != (self.free, self._owned, self._reclaimed):
            raise BrokenPromise(
                f"pages say {found}, the ledger says {(self.free, self._owned, self._reclaimed)}"
            )
        borrowed = np.bincount(others[others >= 0] >> 1, minlength=len(self._names)).tolist()
        if borrowed != [self.borrowed[name] for name in self._names] or (
            (others[others >= 0] & 1).any() or (others == _FREE).any()
        ):
            raise BrokenPromise(f"borrowed pages say {borrowed}, the ledger says {self.borrowed}")
        if self.reclaiming != sum(self._reclaimed):
            raise BrokenPromise(f"reclaiming {self.reclaiming}, not {sum(self._reclaimed)}")
        if self.free + self.reclaiming + sum(self._owned) != self.total:
            raise BrokenPromise("owners' pages do not add up to the pool")
        self.reservations.validate(self.free + self.reclaiming)
        self.holders.validate(self.owner_of)

    def _key(self, owner: str) -> int:
        key = self._ids.get(owner)
        if key is None:
            key = self._ids[owner] = len(self._names)
            self._names.append(owner)
            self._owned.append(0)
            self._reclaimed.append(0)
        return key

    def _check_owned(self, owner: str, pages: Sequence[int], *, attached: bool = False) -> int:
        """Return the owner's key. Raises BrokenPromise unless it owns all the pages; `attached`:
        which may be borrowed ones."""
        key = self._ids.get(owner)
        if key is None:
            if pages:
                raise BrokenPromise(f"{owner} owns no pages")
            return self._key(owner)
        total = len(self._codes) if attached else self.total
        _check(self._codes, total, pages, 2 * key, f"is not owned by {owner}")
        return key


def _check(codes: array[int], total: int, pages: Sequence[int], code: int, fault: str) -> None:
    """Raises BrokenPromise unless the pages, each below `total` and once, all have this code."""
    if len(pages) > 1 and len(set(pages)) != len(pages):
        raise BrokenPromise("a page occurs twice in one call")
    for page in pages:
        if not 0 <= page < total or codes[page] != code:
            raise BrokenPromise(f"page {page} {fault}")


def _write(codes: array[int], pages: Sequence[int], code: int) -> None:
    for page in pages:
        codes[page] = code
