"""Find the segments that a load brings, and order them so that the first job can begin before its
end (decision 051)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ballast.residency.arrival import ArrivalPlan
from ballast.weights.segment_table import PlacedSegment
from ballast.weights.shared import SharedSegment


def segments_to_bring(
    segments: Sequence[PlacedSegment], unfilled: Collection[int], in_place: Collection[int]
) -> tuple[list[int], list[SharedSegment]]:
    """Return the segments whose bytes are neither present nor in flight, and the shared ones among
    them, each once. `unfilled`: own segments without bytes; `in_place`: read in host memory."""
    wanted: list[int] = []
    brought: list[SharedSegment] = []
    for i, s in enumerate(segments):
        if s.shared is None or i in in_place:
            here = i not in unfilled
        else:
            here = s.shared.filled or s.shared.filler is not None or s.shared in brought
            if not here:
                brought.append(s.shared)
        if not here:
            wanted.append(i)
    return wanted, brought


def load_order(
    segments: Sequence[PlacedSegment], n_layers: int, wanted: Sequence[int], ahead: int
) -> tuple[list[int], ArrivalPlan | None]:
    """Return the segments `wanted`, layers last, and when each layer has landed; None: it brings no
    layer.

    `ahead`: most bytes that may still be in flight when the first job begins. A job that finds its
    first layers on the device may begin at once; it waits for the others.
    """
    layers = range(1, 1 + n_layers)
    order = sorted(wanted, key=lambda i: i in layers)  # stable: each kind stays in order
    there: dict[int, int] = {}
    n_bytes = 0
    for i in order:
        n_bytes += segments[i].n_bytes
        if i in layers:
            there[i - 1] = n_bytes
    if not there:
        return order, None
    first = min(there.values()) if len(there) < len(order) or 0 in there else 1
    return order, ArrivalPlan(there, max(first, n_bytes - ahead))
