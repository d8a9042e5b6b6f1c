"""Move quotas of KV memory in steps, from models of low use to models of high use.

MuxServe (Duan et al., 2024), section 3.3: "identifies low-utilization LLMs and proactively
transfers KV cache blocks from these LLMs to high-utilization LLMs". The paper states neither bounds
nor sizes of steps; those here are of the order that its published scheduler has. Used by
`policy.memory.quotas`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

HIGH = 0.9
"""Part of its quota from which a model's use is high."""
KEPT = 0.95
"""Use of what a model of low use is left, at most."""
STEP = 0.1
"""Part of its quota by which a quota grows at a time."""


class Use(NamedTuple):
    """A model's quota, and how much of it is used, in pages."""

    quota: int
    used: int
    least: int
    """The least quota that it may have."""
    most: int
    """The largest quota that it could use now."""
    lacks: bool = False
    """Whether a request of its lacks pages because of the quota."""

    @property
    def high(self) -> bool:
        return self.lacks or self.used >= HIGH * self.quota

    @property
    def to_give(self) -> int:
        """Pages that it can do without."""
        if self.high:
            return 0
        return max(0, self.quota - max(self.least, math.ceil(self.used / KEPT)))

    @property
    def wanted(self) -> int:
        """Pages by which its quota should grow in this step; at once all that its present requests
        need at least."""
        grown = min(self.most - self.quota, max(1, math.ceil(STEP * self.quota)))
        return max(0, self.least - self.quota, grown if self.high else 0)


def next_quotas(uses: Mapping[str, Use]) -> dict[str, int]:
    """Return the quotas after one step; their sum stays.

    Models that need more, those with the highest use first, get it from all that have some to give,
    in proportion to that.
    """
    quotas = {name: u.quota for name, u in uses.items()}
    spare = {name: u.to_give for name, u in uses.items()}
    needy = sorted(uses, key=lambda n: (-_use(uses[n]), n))
    for name in needy:
        total = sum(spare.values())
        wanted = min(uses[name].wanted, total)
        if not wanted:
            continue
        for giver, part in _divided(wanted, spare).items():
            spare[giver] -= part
            quotas[giver] -= part
            quotas[name] += part
    return quotas


def _use(u: Use) -> float:
    return u.used / u.quota if u.quota else math.inf


def _divided(pages: int, among: Mapping[str, int]) -> dict[str, int]:
    """Divide `pages`, at most the sum of `among`, in proportion to it, in whole pages."""
    total = sum(among.values())
    parts = {name: pages * n // total for name, n in among.items()}
    rest = pages - sum(parts.values())
    for name in sorted(among, key=lambda n: (-among[n], n)):
        more = min(rest, among[name] - parts[name])
        parts[name] += more
        rest -= more
    return parts
