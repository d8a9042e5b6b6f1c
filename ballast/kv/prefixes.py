"""Find cached prefixes of one model, and give their memory up.

Part of `KvCache`, whose tables `match` and `remember` them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from ballast.core.units import ceil_div
from ballast.kv.book import BlockBook
from ballast.kv.slabs import Slab


class CachedPrefixes:
    """Cached prefixes of one model's KV cache. Those that a job in flight uses must stay."""

    def __init__(self, book: BlockBook) -> None:
        self._book = book
        self.hit_tokens = 0
        """Tokens whose KV `KvCache.match` has found, since start."""
        self.asked_tokens = 0
        """Tokens that `KvCache.match` was called with, since start."""

    def find(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return the blocks that `KvCache.match` would return, without a change."""
        return [] if self._book.prefix is None else self._book.prefix.find(tokens, salt)

    def names(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Return the names of the blocks that `find` looks for."""
        return [] if self._book.prefix is None else self._book.prefix.chain(tokens, salt)

    def name_of(self, block: int) -> bytes | None:
        """Return a block's name; None: it has none."""
        return None if self._book.prefix is None else self._book.prefix.name_of(block)

    def when_forgotten(self, call: Callable[[int], object]) -> None:
        """Set what is called with a named block whose contents are about to go, or to move."""
        if self._book.prefix is not None:
            self._book.prefix.forgotten = call

    @property
    def missed_blocks(self) -> int:
        """Blocks of cached prefixes that were forgotten to make room, and computed again, since
        start."""
        return 0 if self._book.prefix is None else self._book.prefix.missed

    def held_tokens(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of `tokens` whose KV is in the prefix cache."""
        return self._book.tokens(self.find(tokens, salt))

    def pages_of(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many of `BlockCounts.cached_pages` hold the cached prefix of `tokens`."""
        book = self._book
        idle, borrowed_slabs = book.slabs.idle, book.backing.borrowed_slabs
        found = {block // book.size for block in self.find(tokens, salt)}
        return sum(i in idle and i not in borrowed_slabs for i in found) * book.layout.slab_pages

    def drop(self, pages: int, *, spare: Collection[int] = ()) -> int:
        """Forget cached prefixes until `pages` are freed or no more can be; return pages freed.

        Slabs of tenants with more than their share of the cached ones go first, among these and
        among the others the least recently used; slabs on borrowed pages last, slabs with a block
        of `spare` never. Prefixes in slabs in use stay: forgetting them would free no page.
        """
        book = self._book
        book.version.n += 1
        idle: Iterable[Slab] = book.slabs.to_drop({block // book.size for block in spare})
        if book.backing.borrowed_slabs:
            idle = sorted(idle, key=lambda slab: slab.index in book.backing.borrowed_slabs)
        dropped = list(islice(idle, max(0, ceil_div(pages, book.layout.slab_pages))))
        for slab in dropped:
            book.drop(slab)
        return book.give_back(dropped)

    def scrub(self, tenant: str | None) -> int:
        """Forget the cached prefixes of a tenant (None: of all) that no request uses; return their
        number of blocks."""
        book, prefix = self._book, self._book.prefix
        if prefix is None:
            return 0
        book.version.n += 1
        emptied: list[Slab] = []
        n = 0
        for slab in list(book.slabs.of.values()):
            lost = [b for b in slab.cached if tenant is None or prefix.tenant(b) == tenant]
            if not lost:
                continue
            n += len(lost)
            book.forget(lost)
            book.slabs.uncache(slab, lost)
            if not slab.occupied:
                emptied.append(slab)
        book.give_back(emptied)
        return n
