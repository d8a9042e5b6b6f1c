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

from ballast.core.errors import ConfigError
from ballast.core.units import format_bytes
from ballast.policy.fleet.placement_problem import Homes, PlacementDevice


@dataclass(frozen=True, slots=True)
class ModelDemand:
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
class Filling:
    """A device, with the weights and the KV demand of the models placed there."""

    device: PlacementDevice
    weights: float = 0.0
    demand: float = 0.0

    def with_part(self, claim: ModelDemand) -> Filling:
        """Return the filling with one more part of a model."""
        weights, demand = self.weights + claim.part_weights, self.demand + claim.part_demand
        return Filling(self.device, weights, demand)

    @property
    def pressure(self) -> float:
        """KV pressure ratio (KVPR); infinite if weights leave no memory for KV."""
        room = self.device.memory - self.weights
        return self.demand / room if room > 0 else math.inf


def fillings(
    claims: Iterable[ModelDemand], devices: Sequence[PlacementDevice], homes: Homes
) -> list[Filling]:
    """Return the devices filled with the models that `homes` places there."""
    found = {d.name: Filling(d) for d in devices}
    for claim in claims:
        for name in homes.get(claim.name, ()):
            found[name] = found[name].with_part(claim)
    return list(found.values())


def max_pressure(
    claims: Iterable[ModelDemand], devices: Sequence[PlacementDevice], homes: Homes
) -> float:
    """Return the highest KVPR of any device."""
    return max(f.pressure for f in fillings(claims, devices, homes))


def greedy(
    claims: Sequence[ModelDemand], devices: Sequence[PlacementDevice], threshold: float = 0.0
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
    claims: Sequence[ModelDemand],
    devices: Sequence[PlacementDevice],
    threshold: float,
    first: Callable[[ModelDemand], tuple[float, str]],
) -> dict[str, tuple[str, ...]] | ConfigError:
    """Place every model in the order of the key `first`; returns the error of the first model that
    finds no room."""
    held = {d.name: Filling(d) for d in devices}
    homes: dict[str, tuple[str, ...]] = {}
    for claim in sorted(claims, key=first):
        chosen: list[str] = []
        for part in range(claim.parts):
            then = {n: f.with_part(claim).pressure for n, f in held.items() if n not in chosen}
            best = min(then, key=lambda n: then[n], default=None)
            if best is None or math.isinf(then[best]):
                return misfit(claim, list(held.values()))
            here = claim.devices[part] if part < len(claim.devices) else None
            if here in then and then[here] - then[best] <= threshold * then[here]:
                best = here
            held[best] = held[best].with_part(claim)
            chosen.append(best)
        homes[claim.name] = tuple(chosen)
    return homes


def misfit(claim: ModelDemand, held: Sequence[Filling]) -> ConfigError:
    """Return the error of a model for which no devices, filled so far, have room."""
    if claim.parts > len(held):
        return ConfigError(f"tp of {claim.name}", claim.parts, f"at most {len(held)} devices")
    room = sorted((f.device.memory - f.weights for f in held), reverse=True)[claim.parts - 1]
    each = "" if claim.parts == 1 else f" on each of {claim.parts} devices"
    beside = " beside the others" if any(f.weights for f in held) else ""
    missing = format_bytes(max(1, math.ceil(claim.part_weights - room)))
    return ConfigError(
        "models",
        claim.name,
        f"one that fits: it needs more than {format_bytes(round(claim.part_weights))}{each}, and "
        f"finds {format_bytes(max(0, round(room)))}{beside}: {missing} are missing",
    )


def moved(claims: Iterable[ModelDemand], homes: Homes) -> dict[str, tuple[str, ...]]:
    """Return, for each model that is somewhere now and would load parts elsewhere, its new
    devices."""
    found = {}
    for claim in claims:
        new = tuple(d for d in homes[claim.name] if d not in claim.devices)
        if claim.devices and new:
            found[claim.name] = new
    return found
