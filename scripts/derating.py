"""Fit the fraction of its hardware peaks that a device reaches, from all jobs measured on it.

`sim.roofline` applies the fitted factors.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.optimize import least_squares

from ballast.core.cost import TILE, StepCosts
from ballast.sim.fitting import SCALE, Vector, fit_linear
from ballast.sim.roofline import AllReduce, Derate, Hardware, Sizes
from scripts.point_fits import Points, fit_floored, pair_seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """One model on one device."""

    sizes: Sizes
    prefill: Points | None
    decode: Points


@dataclass(frozen=True, slots=True)
class GroupDerate:
    """The part of a derate that applies only to groups of devices."""

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
        np.vstack([decode_terms(m.sizes, m.decode, hardware)[:, :-1] for m in measured]),
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


@dataclass(frozen=True, slots=True)
class Beside:
    """Decode steps as the longer of the device's work and the host's launches, plus the work that
    the host does alone. In seconds, and factors on the times that the peaks give."""

    layer_seconds: float
    """Seconds of the device per layer, beyond reading."""
    reading: float
    kv: float
    tile: float
    launch_seconds: float
    """Seconds of the host per layer."""
    step_seconds: float
    sequence_seconds: float

    def seconds(self, terms: Vector) -> Vector:
        """Predict steps that have `terms`, as `decode_terms` gives them."""
        layers, reading, batch, kv, tiles, meeting = terms.T
        device = self.layer_seconds * layers + self.reading * reading
        device = device + self.kv * kv + self.tile * tiles + meeting
        after = self.step_seconds + self.sequence_seconds * batch
        seconds: Vector = np.maximum(self.launch_seconds * layers, device) + after
        return seconds


_UNITS = np.array([1.0, 1.0, 1.0, 1e-4, 1e-3, 1e-4])
"""Units that bring the terms (reading, KV, tiles, launches, steps, sequences) near 1."""
_GUESSES = tuple(
    np.array([reading, 1.5, 1.0, launch, 1.0, 1.0])
    for reading in (1.2, 1.6)
    for launch in (0.01, 0.8, 1.5, 2.5)
)


def fit_beside(
    terms: Vector,
    seconds: Vector,
    layer_seconds: float,
    reading: float | None = None,
    launch_seconds: float | None = None,
) -> Beside:
    """To steps of several models on one device under one engine; `terms` as of `decode_terms`.

    What is not None is known. Nothing beats a peak.
    """
    least, most = np.array([1.0, 1.0, 0, 0, 0, 0]), np.full(6, np.inf)
    for i, known in ((0, reading), (3, launch_seconds)):
        if known is not None:
            least[i], most[i] = known / _UNITS[i], known / _UNITS[i] * (1 + 1e-9) + 1e-12

    def made(p: Vector) -> Beside:
        reading, kv, tile, launch, step, sequence = map(float, p * _UNITS)
        return Beside(layer_seconds, reading, kv, tile, launch, step, sequence)

    # The form is not convex: from several guesses, the best.
    found = [
        least_squares(
            lambda p: made(p).seconds(terms) / seconds - 1,
            np.clip(guess, least, most),
            bounds=(least, most),
            loss="soft_l1",
            f_scale=SCALE,
        )
        for guess in _GUESSES
    ]
    return made(np.maximum(min(found, key=lambda r: float(r.cost)).x, least))


def fit_kernels(
    read: Sequence[tuple[float, float]], others: Sequence[float]
) -> tuple[float, float]:
    """`layer_seconds` and `reading` of kernels that were timed layer by layer, without an engine.

    `read`: of each layer, seconds to read its weights at the peak and seconds of its matrix
    products for a few tokens; `others`: seconds of a layer's other kernels.
    """
    peak, seconds = np.array(read).T
    least = np.array([0.0, 1.0])
    begin, reading = fit_linear(np.column_stack([np.ones(len(peak)), peak]), seconds, least)
    return begin + statistics.median(others), reading


def median_derate(derates: Iterable[Derate]) -> Derate:
    """Derate of a device without measurements: for each factor, the median of the other devices."""
    dumped = [d.model_dump() for d in derates]
    return Derate(**{key: statistics.median(d[key] for d in dumped) for key in dumped[0]})


def decode_terms(
    sizes: Sizes, points: Points, hardware: Hardware, group: AllReduce | None = None
) -> Vector:
    """A row per step: layers; seconds at the peaks to read the weights; sequences; seconds at the
    peaks to read their KV, and to multiply what full tiles of sequences add; seconds of all-reduces
    of few bytes. A group's devices share the reading and the arithmetic."""
    tp, least = (1, 0.0) if group is None else (group.tp, group.least)
    ones, batch, tokens, tiles = points.decode_terms.T
    return np.column_stack(
        [
            ones * sizes.layers,
            ones * sizes.pass_bytes / hardware.memory_bandwidth / tp,
            batch,
            tokens * sizes.kv_bytes / hardware.memory_bandwidth / tp,
            tiles * TILE * 2 * sizes.active / hardware.flops / tp,
            ones * 2 * sizes.layers * least,
        ]
    )
