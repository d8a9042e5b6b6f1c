"""Assign each segment of a model its place, from a whole page on, in its range of device
addresses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.memory.copies import Copy
from ballast.memory.vm import Range
from ballast.weights.shared import SharedSegment


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment's place in its model's range of device addresses, and in the host tier."""

    at: int
    """First page in the model's range."""
    n_pages: int
    n_bytes: int
    address: int
    """Device address; the first byte of a page."""
    host_address: int
    """Address in the host tier, where its bytes stay."""
    shared: SharedSegment | None = None
    """The shared segment that owns the pages; None: the model does."""

    @property
    def copy(self) -> Copy:
        """The copy that brings it from the host tier to the device."""
        return Copy(self.address, self.host_address, self.n_bytes)


def range_pages(spec: ModelSpec, page_bytes: int, table_pages: int) -> int:
    """Return the pages of the range that `place_segments` needs."""
    return sum(_slots(n, page_bytes, table_pages) for n in spec.segment_bytes)


def _slots(n_bytes: int, page_bytes: int, table_pages: int) -> int:
    """Return the indices up to the next segment, which begins with a page table."""
    return ceil_div(ceil_div(n_bytes, page_bytes), table_pages) * table_pages


def place_segments(
    spec: ModelSpec,
    range: Range,
    host_addresses: Sequence[int],
    shared: Mapping[str, SharedSegment],
    table_pages: int,
) -> tuple[PlacedSegment, ...]:
    """Give each segment of a model its pages in `range`, in load order, each from the begin of a
    page table on, as in the host tier: page tables move by whole tables between the two.

    `shared`: by digest, the segments whose pages are not the model's own; `table_pages`: pages of a
    page table (`Vm.table_pages`).
    """
    digests = spec.segment_digests or [""] * len(spec.segment_bytes)
    placed: list[PlacedSegment] = []
    at = 0
    for n_bytes, host, digest in zip(spec.segment_bytes, host_addresses, digests, strict=True):
        n_pages = ceil_div(n_bytes, range.page_bytes)
        address = range.address(at)
        placed.append(PlacedSegment(at, n_pages, n_bytes, address, host, shared.get(digest)))
        at += _slots(n_bytes, range.page_bytes, table_pages)
    return tuple(placed)


def own_stretches(
    segments: Sequence[PlacedSegment], among: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """Return maximal runs `(at, n)` of the model's own pages in some of its segments."""
    found: list[tuple[int, int]] = []
    for i, s in enumerate(segments):
        if s.shared is not None or i not in among:
            continue
        if found and sum(found[-1]) == s.at:
            found[-1] = (found[-1][0], found[-1][1] + s.n_pages)
        else:
            found.append((s.at, s.n_pages))
    return tuple(found)
