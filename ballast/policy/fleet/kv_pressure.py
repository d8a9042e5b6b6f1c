"""Compute the KV pressure of devices, and place models so that it is low: Prism, 6.1, Algorithm 1.

The KV pressure ratio (KVPR) of a device is the KV demand of the models placed there over the memory
that their weights leave: how fast KV grows, relative to its room. A model's demand is its token
rate over its TPOT service level, in tokens/s per second, or in bytes where models' KV differs in
size. The greedy algorithm takes models by demand, the greatest first, and gives each to the device
with the least resulting KVPR. A model whose weights are spread over several devices counts as that
many parts (appendix A.2.2), no two of which may be on one device.

Used by the fleet policy `migrate`, by `optimal_placement`, and by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ballast.core.errors import ConfigError
from ballast.core.units import format_bytes
from ballast.policy.fleet.placement_problem import Homes, PlacementDevice

_SOME = math.ulp(0.0)
"""The least memory that is not none."""


class KvDemand(NamedTuple):
    """A model's demand for memory on the devices that serve it."""

    name: str
    weights: float
    """Bytes of all its parts."""
    demand: float
    """KV demand of all its parts: token rate over TPOT service level."""
    parts: int = 1
    """Devices over which it is spread (tensor parallelism)."""
    devices: tuple[str, ...] = ()
    """Devices where it is now; empty: it is on none."""

    @property
    def part_weights(self) -> float:
        return self.weights / self.parts

    @property
    def part_demand(self) -> float:
        return self.demand / self.parts


@dataclass(frozen=True, slots=True)
class DeviceFill:
    """A device, with the weights and the KV demand of the models placed there."""

    device: PlacementDevice
    weights: float = 0.0
    demand: float = 0.0

    def with_part(self, claim: KvDemand) -> DeviceFill:
        """Return the filling with one more part of a model."""
        weights, demand = self.weights + claim.part_weights, self.demand + claim.part_demand
        return DeviceFill(self.device, weights, demand)

    @property
    def pressure(self) -> float:
        """KV pressure ratio (KVPR); infinite if weights leave no memory for KV."""
        room = self.device.memory - self.weights
        return self.demand / room if room > 0 else math.inf


def max_pressure(
    claims: Iterable[KvDemand], devices: Sequence[PlacementDevice], homes: Homes
) -> float:
    """Return the highest KVPR of any device, filled with the models that `homes` places there."""
    found = {d.name: DeviceFill(d) for d in devices}
    for claim in claims:
        for name in homes.get(claim.name, ()):
            found[name] = found[name].with_part(claim)
    return max(f.pressure for f in found.values())


def greedy(
    claims: Sequence[KvDemand], devices: Sequence[PlacementDevice], threshold: float = 0.0
) -> dict[str, tuple[str, ...]]:
    """Place every model by Algorithm 1.

    `threshold`: a part stays where it is unless the chosen device would have a KVPR lower by more
    than this share of its own device's (the paper leaves the unit open; 0: any gain moves it). If a
    model finds no room in the order of demand, the largest models are placed first instead, which
    the paper does not do. Raises ConfigError, with the bytes that are missing, if that fails too.
    """
    by_demand = _greedy(claims, devices, threshold, lambda c: (-c.part_demand, c.name))
    if not isinstance(by_demand, ConfigError):
        return by_demand
    by_size = _greedy(claims, devices, threshold, lambda c: (-c.part_weights, c.name))
    if isinstance(by_size, ConfigError):
        raise by_size
    return by_size


def _greedy(
    claims: Sequence[KvDemand],
    devices: Sequence[PlacementDevice],
    threshold: float,
    first: Callable[[KvDemand], tuple[float, str]],
) -> dict[str, tuple[str, ...]] | ConfigError:
    """Place every model in the order of the key `first`; returns the error of the first model that
    finds no room."""
    held = Fillings(devices)
    homes: dict[str, tuple[str, ...]] = {}
    for claim in sorted(claims, key=first):
        taken: list[str] = []
        for part in range(claim.parts):
            here = claim.devices[part] if part < len(claim.devices) else None
            choice = held.choose(claim, here, threshold, taken=taken)
            if choice is None:
                return held.misfit(claim)
            held.add(claim, choice.device)
            taken.append(choice.device)
        homes[claim.name] = tuple(taken)
    return homes


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The device that Algorithm 1 chooses for a part of a model."""

    device: str
    pressure: float
    """KVPR there, with the part."""
    before: float
    """The same of the device where the part is now; infinite: it is on none, or does not fit."""


class Fillings:
    """Devices that a placement fills, model by model."""

    def __init__(self, devices: Sequence[PlacementDevice]) -> None:
        self._names = [d.name for d in devices]
        self._at = {name: i for i, name in enumerate(self._names)}
        self._memory = [d.memory for d in devices]
        self._weights = [0.0] * len(self._names)
        self._left = [*self._memory]
        """Memory without the weights."""
        self._demand = [0.0] * len(self._names)

    def add(self, claim: KvDemand, device: str) -> None:
        """Place one part of a model on a device."""
        i = self._at[device]
        self._weights[i] += claim.part_weights
        self._left[i] = self._memory[i] - self._weights[i]
        self._demand[i] += claim.part_demand

    def choose(
        self,
        claim: KvDemand,
        here: str | None,
        threshold: float,
        beside: float = 0.0,
        taken: Iterable[str] = (),
    ) -> PlacementChoice | None:
        """Return the device of least KVPR for one part of a model (lines 5 to 8 of Algorithm 1), or
        `here`, where it is now, unless that lowers the KVPR by more than `threshold` of it.
        `beside`: bytes that it needs beside its weights; `taken`: devices that are left out. None:
        it fits nowhere."""
        weights, demand, inf = claim.part_weights, claim.part_demand, math.inf
        least_room = beside or _SOME
        pressures = [
            (d + demand) / room if (room := left - weights) >= least_room else inf
            for left, d in zip(self._left, self._demand, strict=True)
        ]
        for name in taken:
            pressures[self._at[name]] = inf
        least = min(pressures, default=inf)
        if least == inf:
            return None
        before = inf if here is None else pressures[self._at[here]]
        if here is not None and before < inf and before - least <= threshold * before:
            return PlacementChoice(here, before, before)
        return PlacementChoice(self._names[pressures.index(least)], least, before)

    def misfit(self, claim: KvDemand) -> ConfigError:
        """Return the error of a model for which no devices have room."""
        n = len(self._names)
        if claim.parts > n:
            return ConfigError(f"tp of {claim.name}", claim.parts, f"at most {n} devices")
        room = sorted(self._left, reverse=True)[claim.parts - 1]
        each = "" if claim.parts == 1 else f" on each of {claim.parts} devices"
        beside = " beside the others" if any(self._weights) else ""
        missing = format_bytes(max(1, math.ceil(claim.part_weights - room)))
        return ConfigError(
            "models",
            claim.name,
            f"one that fits: it needs more than {format_bytes(round(claim.part_weights))}{each}, "
            f"and finds {format_bytes(max(0, round(room)))}{beside}: {missing} are missing",
        )


def moved(claims: Iterable[KvDemand], homes: Homes) -> dict[str, tuple[str, ...]]:
    """Return, for each model that is somewhere now and would load parts elsewhere, its new
    devices."""
    found = {}
    for claim in claims:
        new = tuple(d for d in homes[claim.name] if d not in claim.devices)
        if claim.devices and new:
            found[claim.name] = new
    return found
