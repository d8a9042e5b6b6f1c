"""What makes way for larger activations, when a model joins whose jobs take more than others'."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.actions import Action, DropCache
from ballast.core.view import DeviceView

WHY = "jobs of a new model take larger activations"


def caches_in_order(view: DeviceView, pages: int) -> Sequence[Action]:
    """Drop cached prefixes of so many `pages`, of one model after another in the fleet's order; of
    all that are cached where these are too few."""
    drops = []
    for m in view.models:
        if pages > 0 and m.cached_pages:
            drops.append(DropCache(m.name, pages, WHY))
            if not m.kv_turning:  # while its layers change, a cache may give nothing up
                pages -= m.cached_pages
    return drops
