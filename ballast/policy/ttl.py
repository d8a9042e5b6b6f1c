"""Idle time to live: models without requests for so long leave the device, under every preset."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.actions import Evict
from ballast.core.view import DeviceView


@dataclass(frozen=True, slots=True)
class Expiry:
    """Models whose time to live is over, and when that of the next one will be."""

    evictions: tuple[Evict, ...] = ()
    wake_at: float | None = None
    """None: no idle model has a time to live that is not over."""


def expire(view: DeviceView) -> Expiry:
    """Evict every idle model that has been without a request for its `ttl`. Pinned models stay."""
    evictions: list[Evict] = []
    later: list[float] = []
    for m in view.models:
        ttl = m.spec.ttl
        if not ttl or m.idle_since is None or m.spec.pinned:
            continue
        at = m.idle_since + ttl
        if at <= view.now:
            evictions.append(Evict(m.name, why=f"no request for {ttl:g} s, its ttl"))
        else:
            later.append(at)
    return Expiry(tuple(evictions), min(later, default=None))
