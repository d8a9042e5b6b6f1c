"""Keep segments that several models contain on the device once, mapped into each of these models.

::

    weights:a    [ 7 ][ 8 ][ 2 ][ 3 ]        a's own range: embeddings, layer 0
    weights:b    [ 7 ][ 8 ][ 5 ][ 6 ]        b's
    owners       pages 7, 8: shared:1f..  2, 3: weights:a  5, 6: weights:b

The pages of a shared segment are freed when its last holder is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.memory.pool import Pool

_OWNER_DIGITS = 12
"""Digits of the digest in the owner's name."""


class Container(Protocol):
    """A model's weights that contain a shared segment."""

    version: ChangeCounter


class SharedSegment:
    """The pages of one segment while any model on the device uses it. Owner ``shared:DIGEST``."""

    def __init__(self, digest: str, n_bytes: int, pool: Pool, page_bytes: int) -> None:
        self.owner = f"shared:{digest[:_OWNER_DIGITS]}"
        self.n_bytes = n_bytes
        self.n_pages = ceil_div(n_bytes, page_bytes)
        self.pages: tuple[int, ...] = ()
        """Pages of the segment; empty while no model uses it."""
        self.holders: dict[str, None] = {}
        """Models that have it mapped, or are about to, in order. Changed only by `add_holder` and
        `remove_holder`."""
        self.parts_of: tuple[Container, ...] = ()
        """Weights of the models that contain it, present or not: the version of each grows with
        every change of holders. Replaced, never mutated, as new models are made by another
        thread."""
        self._going: set[str] = set()
        self.filled = False
        """Whether its bytes are present."""
        self.filler: str | None = None
        """The model whose transfer loads it, while that is in flight."""
        self._pool = pool

    @property
    def staying(self) -> tuple[str, ...]:
        """Holders that are not about to be evicted."""
        return tuple(n for n in self.holders if n not in self._going)

    def add_holder(self, model: str) -> None:
        """Record that a model uses it."""
        self.holders[model] = None
        self._changed()

    def mark_leaving(self, model: str) -> None:
        """Record that a model, if it uses the segment, is about to be evicted; it does until
        then."""
        if model in self.holders:
            self._going.add(model)
            self._changed()

    def remove_holder(self, model: str) -> None:
        """Record that a model does not use it any more, if it did."""
        if model in self.holders:
            del self.holders[model]
            self._going.discard(model)
            self._changed()

    def _changed(self) -> None:
        for model in self.parts_of:
            model.version.n += 1

    def allocate(self, through: str) -> Short | None:
        """Allocate its pages, all or none, through the owner `through`, whose promise is used
        up."""
        pages = self._pool.allocate(through, self.n_pages)
        if isinstance(pages, Short):
            return pages
        self._pool.hand_over(through, self.owner, pages)
        self.pages = pages
        return None

    def adopt(self, owner: str, pages: tuple[int, ...]) -> None:
        """Take pages of another owner, which contain its bytes. It has none."""
        self._pool.hand_over(owner, self.owner, pages)
        self.pages, self.filled = pages, True

    def free(self) -> None:
        """Free the pages. No range may have them mapped."""
        self._pool.give_back(self.owner, self.pages)
        self.pages, self.filled, self.filler = (), False, None

    def validate(self, part_of: Container) -> None:
        """Raise BrokenPromise unless holders, pages and the pool's ledger agree, and it knows the
        weights `part_of`, which contain it."""
        if part_of not in self.parts_of:
            raise BrokenPromise(f"{self.owner}: is no part of weights that contain it")
        if bool(self.holders) != bool(self.pages):
            raise BrokenPromise(f"{self.owner}: {len(self.pages)} pages for nobody")
        if self._pool.ledger.owned(self.owner) != len(self.pages):
            raise BrokenPromise(f"{self.owner}: the pool says otherwise")


def find_shared(
    specs: Iterable[ModelSpec], pool: Pool, page_bytes: int, known: Collection[str] = ()
) -> dict[str, SharedSegment]:
    """Find segments that occur more than once among the models of a device, by digest.

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
