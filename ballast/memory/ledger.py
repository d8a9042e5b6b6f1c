"""Record the owner and the holders of each page of a device, and the promises to each owner.

Used by `Pool` only. Pure bookkeeping: no memory is touched. Invariants, checked by `validate`:

- every page is free, owned by one owner, or reclaiming (given back, its last use not yet over);
- `free + reclaiming + sum(owned)` is the number of pages;
- `promised <= free + reclaiming`;
- what an owner lacks of the pages *guaranteed* to it is kept for it, beside its promise, as far as
  pages are free;
- only an owned page can have holders, any number; owner and holder differ, and the owner cannot
  free the page until the last of them has unmapped it;
- pages *borrowed* from another device have numbers of their own, above those of this device's, and
  count in none of the above: the other device owns them, owners of this one hold them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise

_FREE = -1
_AWAY = -2
"""A page of another device that is not borrowed, or no page."""
# A page of owner k holds the code 2k; once reclaiming, 2k + 1.


class Ledger:
    """Owners, holders and promises; each change is checked, whole or not made, and O(1) a page."""

    def __init__(self, n_pages: int) -> None:
        self.total = n_pages
        self.free = n_pages
        self.reclaiming = 0
        self.promised = 0
        self._codes = array("i", [_FREE]) * n_pages
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self._owned: list[int] = []
        self._reclaimed: list[int] = []
        self._promises: dict[str, int] = {}
        self._floors: dict[str, int] = {}
        self._holders: dict[int, list[str]] = {}
        self._held: dict[str, int] = {}
        self._borrowed: dict[str, int] = {}

    def owned(self, owner: str) -> int:
        """Pages of `owner`, those with holders included, reclaiming ones not."""
        key = self._ids.get(owner)
        return 0 if key is None else self._owned[key]

    def reclaiming_of(self, owner: str) -> int:
        """Pages that `owner` gave back and whose last use is not over."""
        key = self._ids.get(owner)
        return 0 if key is None else self._reclaimed[key]

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
        return max(0, floor - self.owned(owner)) if floor else 0

    @property
    def kept(self) -> int:
        """Pages that all owners together lack of those guaranteed to them."""
        return sum(map(self.kept_for, self._floors)) if self._floors else 0

    def owners(self) -> dict[str, int]:
        """Return pages by owner, without owners of none; the sum is total - free - reclaiming."""
        return {name: n for name, n in zip(self._names, self._owned, strict=True) if n}

    def owner_of(self, page: int) -> str | None:
        """Return a page's owner, for a borrowed page its device; None: it is free, reclaiming, or
        another device's and not borrowed."""
        code = self._codes[page] if page < len(self._codes) else _AWAY
        return None if code < 0 or code & 1 else self._names[code >> 1]

    def holders_of(self, page: int) -> tuple[str, ...]:
        """Holders of the page, once for each `add_holder`, in that order."""
        return tuple(self._holders.get(page, ()))

    def held(self, holder: str) -> int:
        """Pages of other owners or devices that `holder` uses; held twice, a page counts twice."""
        return self._held.get(holder, 0)

    def held_of(self, owner: str) -> dict[str, int]:
        """Number of pages of `owner` that others hold, by holder."""
        found: dict[str, int] = {}
        for page, holders in self._holders.items():
            if self.owner_of(page) == owner:
                for holder in holders:
                    found[holder] = found.get(holder, 0) + 1
        return found

    def available(self, owner: str) -> int:
        """Free pages that are neither promised nor guaranteed to others."""
        return max(0, self.free - self._of_others(owner))

    @property
    def spare(self) -> int:
        """Pages, free or reclaiming, that are neither promised nor guaranteed; negative where
        others still have what has been guaranteed since."""
        return self.free + self.reclaiming - self.promised - self.kept

    def _of_others(self, owner: str) -> int:
        """Pages promised or guaranteed to others."""
        others = self.promised - self._promises.get(owner, 0)
        return others + self.kept - self.kept_for(owner) if self._floors else others

    def promise(self, owner: str, n: int) -> Short | None:
        """Reserve `n` more pages for `owner`, out of what is free or will be."""
        if n < 0:
            raise BrokenPromise(f"promised {n} pages to {owner}")
        short = n - max(0, self.spare)
        if short > 0:
            return Short(short)
        if n:
            self.promised += n
            self._promises[owner] = self._promises.get(owner, 0) + n
        return None

    def cancel_promise(self, owner: str) -> int:
        """Cancel what is promised to `owner`; returns the number of pages."""
        n = self._promises.pop(owner, 0)
        self.promised -= n
        return n

    def allocate(self, owner: str, pages: Sequence[int]) -> None:
        """Give free pages to `owner`: those guaranteed to it first, then those promised."""
        self._check(pages, _FREE, "is not free")
        if len(pages) > self.available(owner):
            raise BrokenPromise(f"{owner} allocates {len(pages)} pages, some promised to others")
        key = self._key(owner)
        promised = max(0, len(pages) - self.kept_for(owner))
        self._write(pages, 2 * key)
        self._owned[key] += len(pages)
        self.free -= len(pages)
        if used := min(promised, self._promises.get(owner, 0)):
            self._promises[owner] -= used
            self.promised -= used
            if not self._promises[owner]:
                del self._promises[owner]

    def give_back(self, owner: str, pages: Sequence[int]) -> None:
        """Mark the owner's pages as reclaiming, until `freed`."""
        key = self._check_owned(owner, pages)
        self._write(pages, 2 * key + 1)
        self._owned[key] -= len(pages)
        self._reclaimed[key] += len(pages)
        self.reclaiming += len(pages)

    def freed(self, owner: str, pages: Sequence[int]) -> None:
        """Mark reclaiming pages as free: their last use is over."""
        key = self._key(owner)
        self._check(pages, 2 * key + 1, f"is not reclaiming from {owner}")
        self._write(pages, _FREE)
        self._reclaimed[key] -= len(pages)
        self.reclaiming -= len(pages)
        self.free += len(pages)

    def hand_over(self, source: str, target: str, pages: Sequence[int]) -> None:
        """Change the owner of pages, without freeing them in between."""
        source_key = self._check_owned(source, pages)
        key = self._key(target)
        self._write(pages, 2 * key)
        self._owned[source_key] -= len(pages)
        self._owned[key] += len(pages)

    def add_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Record that `holder` uses pages of `owner`: they cannot be freed until it is removed."""
        key = self._ids.get(owner, -1)
        self._check(pages, 2 * key, f"is not owned by {owner}", attached=True)
        if holder == owner:
            raise BrokenPromise(f"{owner} holds its own pages")
        for page in pages:
            self._holders.setdefault(page, []).append(holder)
        self._held[holder] = self._held.get(holder, 0) + len(pages)

    def remove_holder(self, owner: str, pages: Sequence[int], holder: str) -> None:
        """Undo one `add_holder` of each page; the caller knows that the holder has unmapped it."""
        key = self._ids.get(owner, -1)
        self._check(pages, 2 * key, f"is not owned by {owner}", attached=True)
        for page in pages:
            if holder not in self._holders.get(page, ()):
                raise BrokenPromise(f"page {page} of {owner} is not held by {holder}")
        for page in pages:
            self._holders[page].remove(holder)
            if not self._holders[page]:
                del self._holders[page]
        if pages:
            self._held[holder] -= len(pages)

    def borrow(self, peer: str, pages: Sequence[int]) -> None:
        """Add pages of another device: `peer` owns them, and owners of this one can hold them."""
        if pages and min(pages) < self.total:
            raise BrokenPromise(f"borrowed from {peer} a page of our own")
        if pages and (more := max(pages) + 1 - len(self._codes)) > 0:
            self._codes.extend(array("i", [_AWAY]) * more)
        self._check(pages, _AWAY, "is borrowed already", attached=True)
        self._write(pages, 2 * self._key(peer))
        self._borrowed[peer] = self._borrowed.get(peer, 0) + len(pages)

    def return_borrowed(self, peer: str, pages: Sequence[int]) -> None:
        """Remove borrowed pages from the ledger; they must have no holder here."""
        if pages and min(pages) < self.total:
            raise BrokenPromise(f"restored to {peer} a page of our own")
        self._check_owned(peer, pages, attached=True)
        self._write(pages, _AWAY)
        if pages:
            self._borrowed[peer] -= len(pages)

    def borrowed(self, peer: str | None = None) -> int:
        """Return the number of pages borrowed from `peer`, or from all peers."""
        return sum(self._borrowed.values()) if peer is None else self._borrowed.get(peer, 0)

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
        if borrowed != [self._borrowed.get(name, 0) for name in self._names] or (
            (others[others >= 0] & 1).any() or (others == _FREE).any()
        ):
            raise BrokenPromise(f"borrowed pages say {borrowed}, the ledger says {self._borrowed}")
        if self.reclaiming != sum(self._reclaimed):
            raise BrokenPromise(f"reclaiming {self.reclaiming}, not {sum(self._reclaimed)}")
        if self.free + self.reclaiming + sum(self._owned) != self.total:
            raise BrokenPromise("owners' pages do not add up to the pool")
        if (
            self.promised != sum(self._promises.values())
            or min(self._promises.values(), default=1) <= 0
        ):
            raise BrokenPromise(f"promised {self.promised}, by owner {self._promises}")
        if self.promised > self.free + self.reclaiming:
            raise BrokenPromise(f"promised {self.promised} of {self.free} + {self.reclaiming}")
        held: dict[str, int] = {}
        for page, holders in self._holders.items():
            if not holders or self.owner_of(page) in (None, *holders):
                raise BrokenPromise(f"page {page} is held by {holders} but its owner is gone")
            for holder in holders:
                held[holder] = held.get(holder, 0) + 1
        if held != {holder: n for holder, n in self._held.items() if n}:
            raise BrokenPromise(f"held pages say {held}, the ledger says {self._held}")

    def _key(self, owner: str) -> int:
        key = self._ids.get(owner)
        if key is None:
            key = self._ids[owner] = len(self._names)
            self._names.append(owner)
            self._owned.append(0)
            self._reclaimed.append(0)
        return key

    def _check(
        self, pages: Sequence[int], code: int, fault: str, *, attached: bool = False
    ) -> None:
        if len(pages) > 1 and len(set(pages)) != len(pages):
            raise BrokenPromise("a page occurs twice in one call")
        codes = self._codes
        total = len(codes) if attached else self.total
        for page in pages:
            if not 0 <= page < total or codes[page] != code:
                raise BrokenPromise(f"page {page} {fault}")

    def _check_owned(self, owner: str, pages: Sequence[int], *, attached: bool = False) -> int:
        key = self._ids.get(owner)
        if key is None:
            if pages:
                raise BrokenPromise(f"{owner} owns no pages")
            return self._key(owner)
        self._check(pages, 2 * key, f"is not owned by {owner}", attached=attached)
        if self._holders:
            for page in pages:
                if page in self._holders:
                    raise BrokenPromise(f"page {page} is held by {self._holders[page][0]}")
        return key

    def _write(self, pages: Sequence[int], code: int) -> None:
        codes = self._codes
        for page in pages:
            codes[page] = code
