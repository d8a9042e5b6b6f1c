"""Map memory beneath a model's segments: pages of its own, shared pages, or host memory.

Used by `WeightsOnDevice`. Choosing what is where, and bringing the bytes, is left to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.weights.segment_table import PlacedSegment, own_stretches


class SegmentMapping:
    """What is mapped beneath the segments in one model's range of device addresses."""

    def __init__(self, pool: Pool, range: BackedRange) -> None:
        self._pool, self._range = pool, range

    def map(
        self, segments: Sequence[PlacedSegment], paged: Collection[int], in_place: Collection[int]
    ) -> Short | None:
        """Map pages beneath the segments `paged`, and host memory beneath those `in_place`; or do
        nothing. Pages of shared segments that have none are allocated. A failing map raises
        DeviceError."""
        owner = self._range.owner
        stretches = own_stretches(segments, paged)
        found = dict.fromkeys(segments[i].shared for i in sorted(paged))
        missing = [shared for shared in found if shared is not None and not shared.pages]
        wanted = sum(n for _, n in stretches) + sum(shared.n_pages for shared in missing)
        short = wanted - self._pool.available(owner)
        if short > 0:
            return Short(short)
        with ExitStack() as undo:
            for shared in missing:
                lacking = shared.allocate(owner)
                if lacking is not None:
                    return lacking
                undo.callback(shared.free)
            lacking = self._range.back_many(stretches)
            if lacking is not None:
                return lacking
            undo.callback(self._release, stretches)
            for i in sorted(in_place):
                s = segments[i]
                self._range.map_host(s.at, s.host_address, s.n_bytes)
                undo.callback(self._range.unmap_host, s.at, s.host_address, s.n_bytes)
            for s in (segments[i] for i in sorted(paged)):
                if s.shared is not None:
                    self._range.alias(s.at, s.shared.pages, s.shared.owner)
                    undo.callback(self._range.unalias, s.at, s.n_pages, s.shared.owner)
            undo.pop_all()
        return None

    def unmap(
        self, segments: Sequence[PlacedSegment], paged: Collection[int], in_place: Collection[int]
    ) -> None:
        """Unmap what is beneath these segments, and free the pages that are the model's own."""
        for s in (segments[i] for i in sorted(in_place)):
            self._range.unmap_host(s.at, s.host_address, s.n_bytes)
        for s in (segments[i] for i in sorted(paged)):
            if s.shared is not None:
                self._range.unalias(s.at, s.n_pages, s.shared.owner)
        self._release(own_stretches(segments, paged))

    def lay(self, segments: Sequence[PlacedSegment], laid: Collection[int]) -> None:
        """Map host memory beneath segments in place of their pages; those that are the model's own
        are freed. A failing map raises DeviceError."""
        self.unmap(segments, laid, ())
        for s in (segments[i] for i in sorted(laid)):
            self._range.map_host(s.at, s.host_address, s.n_bytes)

    def validate(
        self, segments: Sequence[PlacedSegment], absent: Collection[int], in_place: Collection[int]
    ) -> None:
        """Raise BrokenPromise unless shared segments have their own pages beneath them here, and
        the range has host memory beneath as many indices as those `in_place` take."""
        for i, s in enumerate(segments):
            none = i in absent or i in in_place
            here = () if none else self._range.pages(s.at, s.n_pages)
            if s.shared is not None and here != (() if none else s.shared.pages):
                raise BrokenPromise(f"{self._range.owner}: other pages than {s.shared.owner}'s")
        on_host = sum(segments[i].n_pages for i in in_place)
        if self._range.on_host != on_host:
            raise BrokenPromise(f"{self._range.owner}: reads {self._range.on_host}, not {on_host}")

    def _release(self, stretches: Sequence[tuple[int, int]]) -> None:
        for at, n in stretches:
            self._range.release(at, n)
