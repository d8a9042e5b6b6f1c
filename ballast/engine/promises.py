"""Pages set aside for models whose claims a policy has covered, until these take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ballast.core.actions import Promise
from ballast.core.change_counter import ChangeCounter
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.memory.pool import Pool


class Promises:
    """The promises in force, and how far each is filled.

    Invariant: a page is set aside once at most; what a model has taken is not set aside again.
    """

    def __init__(self, pool: Pool, news: ChangeCounter) -> None:
        """`news` grows when promises are withdrawn that a policy has made."""
        self._pool, self._news = pool, news
        self._stated: tuple[Promise, ...] = ()
        self._owners: list[str] = []
        """Owners in the pool for whom pages are, or are to be, set aside."""
        self._unfilled: list[tuple[str, int]] = []
        """(owner, pages that are to be set aside as they become free), in order of precedence."""

    @property
    def stated(self) -> tuple[Promise, ...]:
        """As the policy's last decision stated them."""
        return self._stated

    @property
    def pages(self) -> int:
        """Pages set aside now."""
        return sum(self._pool.ledger.promised_to(owner) for owner in self._owners)

    def suspend(self) -> None:
        """Set nothing aside until a decision's promises are made: its actions come first."""
        for owner in self._owners:
            self._pool.cancel_promise(owner)
        self._owners, self._unfilled = [], []

    def withdraw(self) -> None:
        """Set nothing aside any more."""
        self.suspend()
        if self._stated:
            self._stated = ()
            self._pool.freed.n += 1
            self._news.n += 1

    def make(self, promises: Iterable[Promise], models: Mapping[str, ModelState]) -> bool:
        """Let these promises, in order of precedence, be the ones in force; whether they are others
        than before."""
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
        """Set pages aside that have become free, or are reclaiming, for those who lack some."""
        if not self._unfilled:
            return
        unfilled = []
        for owner, lacking in self._unfilled:
            spare = self._pool.free + self._pool.ledger.reclaiming - self._pool.ledger.promised
            n = min(lacking, max(0, spare))
            short = self._pool.promise(owner, n)
            assert short is None, "it was spare"
            if n < lacking:
                unfilled.append((owner, lacking - n))
        self._unfilled = unfilled
