"""Reserve pages in the pool for models whose claims the memory policy has covered.

Part of `DeviceState`; set by `MemoryDecider` after each decision. Nothing is freed here: pages are
promised as they become free, until the model allocates them or the next decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ballast.core.actions import Promise
from ballast.core.change_counter import ChangeCounter
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.memory.pool import Pool


class Promises:
    """The promises in force, and how far each is filled.

    Invariant: a page is promised once at most; pages that a model has allocated are not promised
    again.
    """

    def __init__(self, pool: Pool, news: ChangeCounter) -> None:
        """`news` counts withdrawals of a policy's promises."""
        self._pool, self._news = pool, news
        self._stated: tuple[Promise, ...] = ()
        self._owners: list[str] = []
        """Owners in the pool that have promises, filled or not."""
        self._unfilled: list[tuple[str, int]] = []
        """(owner, pages still to be promised as they become free), in order of precedence."""

    @property
    def stated(self) -> tuple[Promise, ...]:
        """Promises of the policy's last decision."""
        return self._stated

    @property
    def pages(self) -> int:
        """Pages promised now."""
        return sum(self._pool.ledger.reservations.promised_to(owner) for owner in self._owners)

    def suspend(self) -> None:
        """Cancel all promises until `make`, so that a decision's actions can use the pages."""
        for owner in self._owners:
            self._pool.cancel_promise(owner)
        self._owners, self._unfilled = [], []

    def withdraw(self) -> None:
        """Cancel all promises, and have the policy decide again."""
        self.suspend()
        if self._stated:
            self._stated = ()
            self._pool.freed.n += 1
            self._news.n += 1

    def make(self, promises: Iterable[Promise], models: Mapping[str, ModelState]) -> bool:
        """Replace the promises in force, in order of precedence; return whether they changed."""
        self.suspend()
        before = self._stated
        self._stated = tuple(p for p in promises if p.model in models)
        for p in self._stated:
            m = models[p.model]
            if m.residency is Residency.ABSENT and p.weights:
                self._unfilled.append((m.weights.owner, p.weights))
            if p.kv:
                self._unfilled.append((m.kv.owner, p.kv))
        self._owners = list(dict.fromkeys(owner for owner, _ in self._unfilled))
        self.fill()
        changed = self._stated != before
        self._pool.freed.n += changed
        return changed

    def fill(self) -> None:
        """Promise pages that are free or reclaiming to owners whose promises are not filled yet."""
        if not self._unfilled:
            return
        unfilled = []
        for owner, lacking in self._unfilled:
            n = min(lacking, max(0, self._pool.ledger.spare))
            short = self._pool.promise(owner, n)
            assert short is None, "it was spare"
            if n < lacking:
                unfilled.append((owner, lacking - n))
        self._unfilled = unfilled
