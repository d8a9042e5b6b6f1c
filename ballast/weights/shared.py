"""Segments that are part of several models: on the device once, mapped into each that needs them.

::

    weights:a    [ 7 ][ 8 ][ 2 ][ 3 ]        a's own range: embeddings, layer 0
    weights:b    [ 7 ][ 8 ][ 5 ][ 6 ]        b's
    owners       pages 7, 8: shared:1f..  2, 3: weights:a  5, 6: weights:b
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.core.version import Version
from ballast.memory.pool import Pool

_TOLD_DIGITS = 12
"""Of the digest, in the owner's name."""


class Container(Protocol):
    """The weights of a model that contains a segment."""

    version: Version


class SharedSegment:
    """The pages of one segment while any model on the device uses it. Owner ``shared:DIGEST``."""

    def __init__(self, digest: str, n_bytes: int, pool: Pool, page_bytes: int) -> None:
        self.owner = f"shared:{digest[:_TOLD_DIGITS]}"
        self.n_bytes = n_bytes
        self.n_pages = ceil_div(n_bytes, page_bytes)
        self.pages: tuple[int, ...] = ()
        """Empty while no model uses it."""
        self.holders: dict[str, None] = {}
        """Models that use it, in the order they came; mapped or about to be. Changed by `hold` and
        `drop` alone."""
        self.parts_of: tuple[Container, ...] = ()
        """Models that contain it, on the device or not: each counts changes of its holders.
        Replaced, never changed: models that are to join are made by another thread."""
        self._going: set[str] = set()
        self.filled = False
        """Whether its bytes are there."""
        self.filler: str | None = None
        """The model whose transfer brings them, if one is on its way."""
        self._pool = pool

    @property
    def staying(self) -> tuple[str, ...]:
        """Holders that are not on their way out."""
        return tuple(n for n in self.holders if n not in self._going)

    def add_holder(self, model: str) -> None:
        """A model uses it from now on."""
        self.holders[model] = None
        self._changed()

    def mark_leaving(self, model: str) -> None:
        """A holder is on its way out: it uses the segment until `drop`."""
        self._going.add(model)
        self._changed()

    def remove_holder(self, model: str) -> None:
        """A model uses it no more, if it did."""
        if model in self.holders:
            del self.holders[model]
            self._going.discard(model)
            self._changed()

    def _changed(self) -> None:
        for model in self.parts_of:
            model.version.n += 1

    def allocate(self, buyer: str) -> Short | None:
        """Find pages, out of what is free to the owner `buyer` and promised to it; or nothing."""
        leased = self._pool.allocate(buyer, self.n_pages)
        if isinstance(leased, Short):
            return leased
        self._pool.hand_over(buyer, self.owner, leased)
        self.pages = leased
        return None

    def free(self) -> None:
        """Give the pages back. No range may hold them."""
        self._pool.give_back(self.owner, self.pages)
        self.pages, self.filled, self.filler = (), False, None


def find_shared(
    specs: Iterable[ModelSpec], pool: Pool, page_bytes: int, known: Collection[str] = ()
) -> dict[str, SharedSegment]:
    """Segments that occur more than once among the models of a device, by digest.

    Those whose digests are `known` are left out: they are shared already.
    """
    sizes: dict[str, int] = {}
    times: Counter[str] = Counter()
    for spec in specs:
        if not spec.segment_digests:
            continue
        for digest, n_bytes in zip(spec.segment_digests, spec.segment_bytes, strict=True):
            times[digest] += 1
            if sizes.setdefault(digest, n_bytes) != n_bytes:
                raise BrokenPromise(f"{spec.name}: segments of unlike sizes have digest {digest}")
    return {
        digest: SharedSegment(digest, sizes[digest], pool, page_bytes)
        for digest, n in times.items()
        if n > 1 and digest not in known
    }
