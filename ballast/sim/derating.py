"""How far from its peaks a device runs, fitted to everything measured on it at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ballast.core.cost import TILE, StepCosts
from ballast.sim.fitting import Points, Vector, fit_floored, fit_linear, pair_seconds
from ballast.sim.roofline import Derate, Hardware, Sizes


@dataclass(frozen=True, slots=True)
class Measured:
    """One model on one device."""

    sizes: Sizes
    prefill: Points | None
    decode: Points


@dataclass(frozen=True, slots=True)
class GroupDerate:
    """That part of a derate that only groups of devices show."""

    group_layer_seconds: float
    group_floor: float
    group_start: float


def fit_group(rows: Sequence[tuple[int, StepCosts]]) -> GroupDerate:
    """From (layers, costs) of models in groups, several of them so small that the host's work
    bounds their steps: these all take the same per layer."""
    return GroupDerate(
        group_layer_seconds=float(np.quantile([c.base / layers for layers, c in rows], 0.25)),
        group_floor=statistics.median(c.floor / c.base for _, c in rows),
        group_start=statistics.median(1 - c.hidden / c.base for _, c in rows),
    )


def fit_derate(measured: Sequence[Measured], hardware: Hardware, group: GroupDerate) -> Derate:
    """Needs two models or more, at least one with prefills. Nothing beats a peak: times of reading
    and arithmetic are at least those that the peaks give."""
    layer, weights, sequence, kv, tile = fit_linear(
        np.vstack([_decode_terms(m.sizes, m.decode, hardware) for m in measured]),
        np.concatenate([m.decode.seconds for m in measured]),
        np.array([0.0, 1.0, 0.0, 1.0, 0.0]),
    )
    prefills = [(m.sizes, m.prefill) for m in measured if m.prefill is not None]
    flops = hardware.flops
    attention = max(
        1.0, statistics.median(pair_seconds(p) * flops / s.pair_flops for s, p in prefills)
    )
    bases = [
        np.full(len(p), layer * s.layers + weights * s.pass_bytes / hardware.memory_bandwidth)
        for s, p in prefills
    ]
    floor, start, arithmetic = fit_floored(
        np.concatenate(bases),
        np.concatenate([2 * s.active * p.tokens / flops for s, p in prefills]),
        attention * np.concatenate([s.pair_flops * p.pairs / flops for s, p in prefills]),
        np.concatenate([p.seconds for _, p in prefills]),
        least_slope=1.0,
    )
    return Derate(
        **asdict(group),
        layer_seconds=layer,
        weights=weights,
        floor=floor,
        start=start,
        arithmetic=arithmetic,
        attention=attention,
        sequence_seconds=sequence,
        kv=kv,
        tile=tile,
    )


def median_derate(derates: Iterable[Derate]) -> Derate:
    """Of a device on which nothing was measured: factor by factor, the others' median."""
    dumped = [d.model_dump() for d in derates]
    return Derate(**{key: statistics.median(d[key] for d in dumped) for key in dumped[0]})


def _decode_terms(sizes: Sizes, points: Points, hardware: Hardware) -> Vector:
    ones, batch, tokens, tiles = points.decode_terms.T
    return np.column_stack(
        [
            ones * sizes.layers,
            ones * sizes.pass_bytes / hardware.memory_bandwidth,
            batch,
            tokens * sizes.kv_bytes / hardware.memory_bandwidth,
            tiles * TILE * 2 * sizes.active / hardware.flops,
        ]
    )
