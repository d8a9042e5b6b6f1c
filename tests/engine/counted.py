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
from ballast.kv.backing import PageBounds
from ballast.kv.blocks import KvCache
from ballast.kv.book import BlockBook
from ballast.kv.borrowed import BorrowedBlocks
from ballast.kv.counts import BlockCounts
from ballast.kv.prefixes import CachedPrefixes
from ballast.kv.staging import BlockStaging
from ballast.weights.residency import WeightsOnDevice


def of_kv(book: BlockBook) -> object:
    counts = BlockCounts(book)
    cached = counts.cached_pages, counts.cached_borrowed_pages
    return (
        (book.backing.pages, *cached, counts.loose_pages, counts.at_hand, len(book.staged)),
        of_bounds(book.backing.bounds),
        dict(book.refs),
        {slab.index: slab.used for slab in book.slabs.of.values()},
        set() if book.prefix is None else book.prefix.kept(),
    )


def of_bounds(bounds: PageBounds) -> object:
    return bounds.limit, bounds.floor, bounds.cap


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
    KvCache: lambda kv: of_kv(kv.book),
    PageBounds: of_bounds,
    **dict.fromkeys((CachedPrefixes, BorrowedBlocks, BlockStaging), lambda part: of_kv(part._book)),
    WeightsOnDevice: of_weights,
    Batch: of_batch,
    Waiting: lambda waiting: [r.id for r in waiting],
    Paused: lambda paused: list(paused),
    Life: str,
}
"""By class that counts its changes, what snapshots show of it."""


_BOOKS: dict[type[Any], Callable[[Any], Any]] = {
    KvCache: lambda kv: kv.book,
    **dict.fromkeys((CachedPrefixes, BorrowedBlocks, BlockStaging), lambda part: part._book),
}
"""Of those that count in a book that they share."""


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
        version_of = _BOOKS.get(type(self), lambda counted: counted)(self)
        before, version = facts(self), version_of.version.n
        result = method(self, *args, **kwargs)
        if facts(self) != before:
            calls[method.__qualname__] += 1
            assert version_of.version.n > version, (
                f"{method.__qualname__} does not count its change"
            )
        return result

    return checked
