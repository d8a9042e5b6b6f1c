"""Choose layers whose KV is swapped, and compute the time of a pass then (MIRAGE, 3.2, 7.4).

Used by the KV-swap policy (`policy.memory.kvswap`); pure formulas. As with weights, the layers of a
`Rotation` share slots. Unlike weights, a layer's KV changes when the layer runs, so it is stored to
the host before the slot is reused: traffic goes both ways. The batch decides which KV is loaded and
is not known before a pass begins, so each pass's loads and stores happen within that pass.
"""

from __future__ import annotations

from functools import lru_cache

from ballast.core.link import Direction, LinkRates
from ballast.core.rotation import Rotation

SLOTS = (1, 2, 3)
"""Numbers of slots to try: with three, one is in use, one is loaded and one is stored."""


@lru_cache(maxsize=256)
def spread(n: int, m: int) -> tuple[int, ...]:
    """Return `m` of `n` layers, spread over a pass, ascending.

    Contains `spread(n, k)` for all k < m, since each added or removed layer costs a copy. Evenly
    spaced for m = 1, 3, 7, ...; between these some gaps are twice as wide as others.
    """
    return tuple(sorted(_order(n)[:m]))


@lru_cache(maxsize=256)
def _order(n: int) -> tuple[int, ...]:
    """Return all layers in order of bisection: the middle one, the middles of the halves, ..."""
    found: dict[int, None] = {}
    parts = 2
    while parts <= 2 * n:
        bits = parts.bit_length() - 2
        for i in range(1 << bits):
            reverse = int(f"{i:0{bits}b}"[::-1], 2) if bits else 0
            found.setdefault((2 * reverse + 1) * n // parts)
        parts *= 2
    return (*found, *(layer for layer in range(n) if layer not in found))


@lru_cache(maxsize=4096)
def swapped_seconds(
    n: int, rotation: Rotation, seconds: float, loaded: int, stored: int, rates: LinkRates
) -> float:
    """Return the seconds of a pass over `n` layers that takes `seconds` without waits; exact.

    `loaded`, `stored`: bytes of each rotating layer. Each layer computes for an equal part of the
    seconds. A layer begins when its KV is loaded; its KV is stored when it is done; then its slot
    is free for the next layer. Loads are served in the order of layers, and so are stores, both at
    the link's rates; the pass ends with the last store.
    """
    layers, slots = rotation.layers, rotation.slots
    if not layers:
        return seconds
    each = seconds / n
    alone = [rates.of(d, mixed=False) for d in (Direction.TO_DEVICE, Direction.TO_HOST)]
    mixed = [rates.of(d, mixed=True) for d in (Direction.TO_DEVICE, Direction.TO_HOST)]
    starts = [*layers, n]
    now = 0.0
    loads = stores = computed = 0
    """Numbers of loads, stores and layers that have ended."""
    load_left, store_left = float(loaded), float(stored)
    until: float | None = layers[0] * each
    """Time at which the present computation ends; None: it waits for a layer."""
    within = False
    """Whether the present computation is that of a rotating layer."""
    while stores < len(layers) or until is not None:
        loading = loads < len(layers) and loads < stores + slots
        storing = stores < computed
        to_device, to_host = mixed if loading and storing else alone
        ends = [
            now + load_left / to_device if loading else float("inf"),
            now + store_left / to_host if storing else float("inf"),
            float("inf") if until is None else until,
        ]
        then = min(ends)
        what = ends.index(then)
        passed, now = then - now, then
        if loading:
            load_left = max(0.0, load_left - passed * to_device)
        if storing:
            store_left = max(0.0, store_left - passed * to_host)
        if what == 0:
            loads, load_left = loads + 1, float(loaded)
        elif what == 1:
            stores, store_left = stores + 1, float(stored)
        elif within:
            computed, within = computed + 1, False
            until = now + (starts[computed] - starts[computed - 1] - 1) * each
            continue
        else:
            until = None
        if until is None and computed < len(layers) and loads > computed:
            until, within = now + each, True
    return now
