"""What makes way for KV that leaves pages borrowed from another device, which asks them back."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.actions import Action, DropCache
from ballast.core.view import DeviceView

WHY = "KV comes home from borrowed pages"


def caches_for(view: DeviceView, model: str, own: int, pages: int) -> Sequence[Action]:
    """Drop cached prefixes of so many `pages`, `own` of them the model's: its limit asks for these.
    The others are those of the models longest unused. Nothing is dropped where all are too few."""
    cached = {m.name: m.cached_pages for m in view.models}
    missing = max(own, pages)
    if own > cached[model] or missing > sum(cached.values()):
        return ()
    drops = [DropCache(model, own, WHY)] if own > 0 else []
    cached[model] -= max(0, own)
    missing -= max(0, own)
    for m in sorted(view.models, key=lambda m: (m.last_used, m.name)):
        n = min(missing, cached[m.name])
        if n > 0:
            drops.append(DropCache(m.name, n, WHY))
            missing -= n
    return drops
