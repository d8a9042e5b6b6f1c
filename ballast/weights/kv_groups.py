"""Divide a model's layers into groups with equal windows, whose blocks of KV have one size.

Blocks of all groups come from the same slabs, so they are as large as the largest needs; layers are
divided such that little of them is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ballast.core.model import LayerKv
from ballast.core.units import ceil_div

MOST_GROUPS = 12
"""Bound of the groups of a model: each has its own block table."""
MOST_EMPTY = 0.25
"""Share of blocks that may be empty, for layers to be in groups at all."""
GOOD_EMPTY = 0.08
"""Share that is small enough to prefer fewer groups."""


def grouped(
    layers: Sequence[LayerKv], windows: Mapping[int, int | None]
) -> tuple[tuple[LayerKv, ...], tuple[int | None, ...]] | None:
    """Return the layers with their groups, and the window of each group; None: there are no
    windows, or no good groups. `windows`: of each layer."""
    own = [kv for kv in layers if kv.source is None]
    if all(windows[kv.layer] is None for kv in own):
        return None
    if any(windows[kv.layer] != windows[kv.source] for kv in layers if kv.source is not None):
        return None
    classes: dict[int | None, list[LayerKv]] = {}
    for kv in sorted(own, key=lambda kv: windows[kv.layer] is not None):
        classes.setdefault(windows[kv.layer], []).append(kv)
    best: tuple[float, int, list[_Part]] | None = None
    for most in sorted({_size(c[: n + 1]) for c in classes.values() for n in range(len(c))}):
        parts = [(w, part) for w, c in classes.items() for part in _cut(c, most)]
        if len(parts) > MOST_GROUPS:
            continue
        sizes = [_size(part) for _, part in parts]
        empty = 1 - sum(sizes) / (len(sizes) * max(sizes))
        if best is None or (max(empty, GOOD_EMPTY), len(parts)) < best[:2]:
            best = max(empty, GOOD_EMPTY), len(parts), parts
    if best is None or best[0] > MOST_EMPTY:
        return None
    group_of = {kv.layer: i for i, (_, part) in enumerate(best[2]) for kv in part}
    homes = {kv.layer: kv.layer if kv.source is None else kv.source for kv in layers}
    placed = tuple(replace(kv, group=group_of[homes[kv.layer]]) for kv in layers)
    return placed, tuple(w for w, _ in best[2])


_Part = tuple[int | None, Sequence[LayerKv]]


def _size(layers: Sequence[LayerKv]) -> int:
    return sum(kv.elements for kv in layers)


def _cut(layers: Sequence[LayerKv], most: int) -> list[Sequence[LayerKv]]:
    """Cut layers into as few parts as have at most `most` elements, equally long ones."""
    fitting = max(1, most * len(layers) // _size(layers))
    n = ceil_div(len(layers), ceil_div(len(layers), ceil_div(len(layers), fitting)))
    ends = [len(layers) * (i + 1) // n for i in range(n)]
    return [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]
