"""Check that whatever holds what policies see of a model counts its changes."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ballast.engine.batch import Batch, Paused
from ballast.engine.life import Life
from ballast.engine.waiting import Waiting
from ballast.kv.blocks import KvCache
from ballast.weights.residency import WeightsOnDevice


def of_kv(kv: KvCache) -> object:
    return (
        (kv.pages, kv.cached_pages, kv.loose_pages, kv.cached_borrowed_pages, kv.at_hand),
        (kv.limit, kv.fixed, kv.rotation, kv.layout, kv.layer_pages),
        dict(kv._refs),
        {slab.index: slab.used for slab in kv._slabs.of.values()},
        set() if kv._prefix is None else kv._prefix.kept(),
    )


def of_weights(weights: WeightsOnDevice) -> object:
    slots = weights.slots
    shared = [(s.owner, s.n_pages, s.staying) for s in weights.shared]
    here = weights.backed, weights.pages, weights.present_pages, weights.plan.parts
    here = (*here, weights.promotion.pages, weights.promotion.cancelled)
    return here, slots.rotation, slots.rotatable, slots.layer_pages, shared


def of_batch(batch: Batch) -> object:
    running = [(r.id, len(r.tokens), r.computed, r.in_flight, r.last_at) for r in batch]
    return running, [r.id for r in batch.leaving]


FACTS: dict[type[Any], Callable[[Any], object]] = {
    KvCache: of_kv,
    WeightsOnDevice: of_weights,
    Batch: of_batch,
    Waiting: lambda waiting: [r.id for r in waiting],
    Paused: lambda paused: list(paused),
    Life: str,
}
"""By class that counts its changes, what snapshots show of it."""


def count(patch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    """From now on every public method, and every property that can be set, of these classes fails
    if it changes what snapshots show without counting that. `calls`: those that changed it."""
    for owner, facts in FACTS.items():
        names = {name for base in owner.__mro__[:-1] for name in vars(base)}
        for name in sorted(names - {"__init__"}):
            found = inspect.getattr_static(owner, name)
            public = not name.startswith("_")
            if inspect.isfunction(found) and public and name not in ("version", "validate"):
                patch.setattr(owner, name, _counting(found, facts, calls))
            elif isinstance(found, property) and found.fset is not None:
                setter = _counting(found.fset, facts, calls)
                patch.setattr(owner, name, property(found.fget, setter))


def _counting(
    method: Callable[..., Any], facts: Callable[[Any], object], calls: Counter[str]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, version = facts(self), self.version.n
        result = method(self, *args, **kwargs)
        if facts(self) != before:
            calls[method.__qualname__] += 1
            assert self.version.n > version, f"{method.__qualname__} does not count its change"
        return result

    return checked
