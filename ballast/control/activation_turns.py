"""Choose the models that API keys may have activated next on one device, in turns and within each
key's budget.

Used by `OpenRequests.dispatch`. A worker activates whatever it has requests for, and evicts idle
models for it; so requests for a model whose weights are absent are sent only when it is their
key's turn. Requests for other models pass.

A model is *coming* from when a request for it is sent until its weights are resident, or until the
worker has no more requests for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ballast.core.token_bucket import TokenBucket

AT_ONCE = 2
"""Models coming at a time for keys with a budget: one is copied, and one is ready to follow. A key
for which none is coming may have one more."""


@dataclass(frozen=True, slots=True)
class ModelWish:
    """A key's wish for a model whose weights are absent."""

    key: str
    model: str
    per_minute: int
    """Activations that the key may cause in a minute."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Models whose requests are sent now, and when the next one may be, if none comes earlier."""

    models: frozenset[str]
    seconds: float | None
    """Time until a key's budget allows it another activation; None: no budget is in the way."""


@dataclass(slots=True)
class ActivationTurns:
    """The models that are coming, the keys' budgets, and whose turn it is; on one device."""

    coming: dict[str, str] = field(default_factory=dict)
    """Key for which each model is coming."""
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)
    """Number of each key's last turn."""
    _turn: int = 0

    def keep(self, models: Collection[str]) -> None:
        """Forget the models that are coming no more: all but `models`."""
        self.coming = {m: key for m, key in self.coming.items() if m in models}

    def choose(self, wishes: Sequence[ModelWish], now: float) -> Turns:
        """Choose among `wishes`, in order of arrival, and charge the keys.

        The next model is that of the key with the fewest models coming; among equals, of the key
        whose last turn is longest ago.
        """
        queues: dict[str, list[ModelWish]] = {}
        for wish in wishes:
            queues.setdefault(wish.key, []).append(wish)
        chosen: set[str] = set()
        waits: dict[str, float] = {}
        while able := self._able(queues, waits, now):
            counts = Counter(self.coming.values())
            key = min(able, key=lambda k: (counts[k], self._last.get(k, 0)))
            wish = queues[key].pop(0)
            self._turn += 1
            self._last[key] = self._turn
            self._buckets[key].spend(1)
            self.coming[wish.model] = key
            chosen.add(wish.model)
        return Turns(frozenset(chosen), min(waits.values(), default=None))

    def _able(
        self, queues: Mapping[str, list[ModelWish]], waits: dict[str, float], now: float
    ) -> list[str]:
        """Return the keys that may have a model activated now; adds to `waits` the seconds until
        the budgets of others allow it."""
        counts = Counter(self.coming.values())
        able = []
        for key, queue in queues.items():
            queue[:] = [wish for wish in queue if wish.model not in self.coming]
            if not queue or (counts.total() >= AT_ONCE and counts[key]):
                continue
            per_minute = queue[0].per_minute
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = TokenBucket(per_minute, now)
            wait = bucket.wait(1, per_minute, now)
            if wait > 0:
                waits[key] = wait
            else:
                able.append(key)
        return able
