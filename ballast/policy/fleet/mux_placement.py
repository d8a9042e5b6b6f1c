"""Place models on meshes of devices by popularity and computation: MuxServe, section 3.2.

Algorithm 2 finds, for each number of devices that a model may be spread over, the smallest share of
their compute on which it serves its request rate alone. Algorithm 1 tries every way to divide the
devices into meshes, and places the models on each, those that compute most first, where the
estimated throughput (`mux_estimate`) grows most; the best of these wins. Among equals, as where all
rates are served, the one that claims least compute wins, a rule that the paper does not state. If
this order finds no room for all models in any division, the largest models are placed first
instead, also our addition. A local search then moves and exchanges models as long as that improves
the estimate.

Used by the simulator's placement answers, not by a running fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product

from ballast.core.errors import ConfigError
from ballast.core.units import format_bytes
from ballast.policy.fleet.mux_estimate import Estimate, Tenant, estimate
from ballast.policy.fleet.placement_problem import PlacementDevice

SHARES = tuple(n / 10 for n in range(1, 11))
"""Shares of a mesh's compute that Algorithm 2 tries for a model's decode steps."""
ENOUGH = 1 - 1e-6
"""Part of its request rate from which a model counts as served: all, but for rounding."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A group of devices over which each of its models is spread."""

    devices: tuple[str, ...]
    memory: float
    """Bytes in all: the number of devices times the least memory of one."""
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EstimatedPlacement:
    """A placement, with its expected throughput."""

    meshes: tuple[Mesh, ...]
    """Meshes that have models."""
    estimates: Mapping[str, Estimate]
    greedy: float
    """Throughput of Algorithm 1's placement, before the local search."""

    @property
    def throughput(self) -> float:
        """Requests per second of all models."""
        return sum(e.rate for e in self.estimates.values())

    @property
    def homes(self) -> dict[str, list[str]]:
        """Devices of each model."""
        return {name: list(mesh.devices) for mesh in self.meshes for name in mesh.models}


def place(
    tenants: Sequence[Tenant], devices: Sequence[PlacementDevice], per_host: int = 8
) -> EstimatedPlacement:
    """Place every model on a mesh. A mesh has 1, 2, 4, ... consecutive devices of one host, of
    `per_host` devices each.

    Raises ConfigError, with the bytes that are missing, for a model that fits on no mesh alone, or
    on none beside the others.
    """
    search = _Search(tenants)
    hosts = [devices[i : i + per_host] for i in range(0, len(devices), per_host)]
    search.refuse_misfits([mesh for host in hosts for g in mesh_groups([host]) for mesh in g])
    best: tuple[float, float, list[Mesh]] | None = None
    for by_size in (False, True):
        for group in mesh_groups(hosts) if best is None else ():
            found = search.greedy(group, by_size=by_size)
            if found is not None:
                throughput, claimed = search.total(found), search.claimed(found)
                if best is None or (_level(throughput), -claimed) > (_level(best[0]), -best[1]):
                    best = throughput, claimed, found
    if best is None:
        assert search.misfit is not None
        raise search.misfit
    meshes = search.improved(best[2])
    estimates = {n: e for mesh in meshes for n, e in search.estimates(mesh).items()}
    return EstimatedPlacement(tuple(mesh for mesh in meshes if mesh.models), estimates, best[0])


def mesh_groups(hosts: Sequence[Sequence[PlacementDevice]]) -> Iterator[list[Mesh]]:
    """Yield every way to divide hosts into meshes of 1, 2, 4, ... devices, except ways that differ
    only in which of several equal hosts is divided how."""
    kinds: dict[tuple[float, ...], list[Sequence[PlacementDevice]]] = {}
    for host in hosts:
        kinds.setdefault(tuple(d.memory for d in host), []).append(host)
    ways = [
        combinations_with_replacement(list(_partitions(len(memory))), len(alike))
        for memory, alike in kinds.items()
    ]
    for choice in product(*ways):
        yield [
            mesh
            for alike, cuts in zip(kinds.values(), choice, strict=True)
            for host, sizes in zip(alike, cuts, strict=True)
            for mesh in _cut(host, sizes)
        ]


def _partitions(n: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write n as a sum of powers of two, largest first."""
    if n == 0:
        yield ()
    size = 1 << (min(n, most or n).bit_length() - 1) if n else 0
    while size:
        for rest in _partitions(n - size, size):
            yield (size, *rest)
        size //= 2


def _cut(host: Sequence[PlacementDevice], sizes: Sequence[int]) -> Iterator[Mesh]:
    at = 0
    for size in sizes:
        part = host[at : at + size]
        yield Mesh(tuple(d.name for d in part), size * min(d.memory for d in part))
        at += size


@dataclass(slots=True)
class _Search:
    """Search for a placement, with a cache of estimates by models, number of devices and memory."""

    tenants: Sequence[Tenant]
    misfit: ConfigError | None = None
    """Error of the first model that found no mesh beside others."""
    _by_name: dict[str, Tenant] = field(init=False)
    _shares: dict[tuple[str, int, float], float | None] = field(default_factory=dict)
    _known: dict[tuple[frozenset[str], int, float], dict[str, Estimate] | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._by_name = {t.name: t for t in self.tenants}

    def candidate(self, t: Tenant, mesh: Mesh) -> float | None:
        """Run Algorithm 2: return the smallest share of a mesh's compute on which a model serves
        its rate alone; all of it if none is enough; None if the model does not fit."""
        n = len(mesh.devices)
        key = t.name, n, mesh.memory
        if key not in self._shares:
            found: float | None = None
            for share in SHARES if n >= t.least_devices else ():
                alone = estimate([t], {t.name: share}, n, mesh.memory)
                if alone is None:
                    break
                found = share
                if alone[t.name].rate >= ENOUGH * t.traffic.rate:
                    break
            self._shares[key] = found
        return self._shares[key]

    def estimates(self, mesh: Mesh) -> dict[str, Estimate]:
        """Return the estimates of a mesh's models."""
        return self._of(mesh, mesh.models) or {}

    def total(self, meshes: Sequence[Mesh]) -> float:
        return sum(e.rate for mesh in meshes for e in self.estimates(mesh).values())

    def claimed(self, meshes: Sequence[Mesh]) -> float:
        """Return the compute that decode steps claim, in devices."""
        return sum(self._claim(self._by_name[n], mesh) for mesh in meshes for n in mesh.models)

    def _claim(self, t: Tenant, mesh: Mesh) -> float:
        return len(mesh.devices) * (self.candidate(t, mesh) or 0.0)

    def greedy(self, group: Sequence[Mesh], *, by_size: bool = False) -> list[Mesh] | None:
        """Run Algorithm 1 on one group of meshes; None if a model finds no room. `by_size`: place
        the largest models first, not those that compute most."""
        meshes = list(group)

        def first(t: Tenant) -> tuple[float, str]:
            return -(t.weights if by_size else self._computation(t, group)), t.name

        for t in sorted(self.tenants, key=first):
            gains: list[tuple[float, float, float, int]] = []
            seen: set[tuple[int, float, tuple[str, ...]]] = set()
            for i, mesh in enumerate(meshes):
                like = len(mesh.devices), mesh.memory, mesh.models
                if like in seen:
                    continue
                seen.add(like)
                after = self._rate(mesh, (*mesh.models, t.name))
                if after is not None:
                    spare = mesh.memory - sum(self._by_name[n].weights for n in mesh.models)
                    gain = after - (self._rate(mesh, mesh.models) or 0.0)
                    gains.append((_level(gain), -self._claim(t, mesh), spare, -i))
            if not gains:
                self.misfit = self.misfit or self._crowded(t, meshes)
                return None
            i = -max(gains)[3]
            meshes[i] = _with(meshes[i], (*meshes[i].models, t.name))
        return meshes

    def improved(self, meshes: Sequence[Mesh]) -> list[Mesh]:
        """Move a model to another mesh, or exchange two, as long as the estimate grows."""
        meshes = list(meshes)
        while (better := self._step(meshes)) is not None:
            meshes = better
        return meshes

    def _step(self, meshes: list[Mesh]) -> list[Mesh] | None:
        """Return the change that improves the estimate most, or None."""
        best: tuple[float, list[Mesh]] | None = None
        for i, a in enumerate(meshes):
            for name in a.models:
                for j, b in enumerate(meshes):
                    if i == j:
                        continue
                    for other in (None, *b.models) if i < j else (None,):
                        ours = tuple(n for n in a.models if n != name)
                        theirs = tuple(n for n in b.models if n != other)
                        ours = ours if other is None else (*ours, other)
                        theirs = (*theirs, name)
                        gain = self._gain((a, ours), (b, theirs))
                        if gain is not None and gain > max(1e-9, best[0] if best else 0.0):
                            changed = list(meshes)
                            changed[i], changed[j] = _with(a, ours), _with(b, theirs)
                            best = gain, changed
        return None if best is None else best[1]

    def _gain(self, *changes: tuple[Mesh, tuple[str, ...]]) -> float | None:
        gain = 0.0
        for mesh, models in changes:
            after = self._rate(mesh, models)
            if after is None:
                return None
            gain += after - (self._rate(mesh, mesh.models) or 0.0)
        return gain

    def _rate(self, mesh: Mesh, models: Sequence[str]) -> float | None:
        """Return F of Algorithm 1 in requests per second; None if the models do not fit."""
        found = self._of(mesh, models)
        return None if found is None else sum(e.rate for e in found.values())

    def _of(self, mesh: Mesh, models: Sequence[str]) -> dict[str, Estimate] | None:
        n = len(mesh.devices)
        key = frozenset(models), n, mesh.memory
        if key not in self._known:
            tenants = [t for t in self.tenants if t.name in key[0]]
            shares = {t.name: self.candidate(t, mesh) for t in tenants}
            given = {name: share for name, share in shares.items() if share is not None}
            fits = len(given) == len(tenants)
            self._known[key] = estimate(tenants, given, n, mesh.memory) if fits else None
        return self._known[key]

    def _computation(self, t: Tenant, group: Sequence[Mesh]) -> float:
        """Return the device-seconds per second that a model's requests take, on the fewest devices
        that it fits on; infinite if it fits on none, so that it is placed first and fails at
        once."""
        fits = [m for m in group if self.candidate(t, m) is not None]
        if not fits:
            return math.inf
        n = min(len(m.devices) for m in fits)
        return n * t.costs(n, 1.0).work(t.traffic, t.tpot, t.most_running)

    def refuse_misfits(self, meshes: Sequence[Mesh]) -> None:
        """Raise ConfigError for a model that fits on none of the possible meshes."""
        if not meshes:
            raise ConfigError("devices", "none", "at least one")
        for t in self.tenants:
            if not any(self.candidate(t, mesh) is not None for mesh in meshes):
                most = max(len(mesh.devices) for mesh in meshes)
                if most < t.least_devices:
                    allowed = f"at most {most}, as the devices of one host make up"
                    raise ConfigError(f"tp of {t.name}", t.least_devices, allowed)
                raise self._crowded(t, [m for m in meshes if len(m.devices) >= t.least_devices])

    def _least(self, name: str) -> float:
        """Return the bytes of a model's weights and one request."""
        t = self._by_name[name]
        return t.weights + t.request_bytes

    def _crowded(self, t: Tenant, meshes: Sequence[Mesh]) -> ConfigError:
        needed = self._least(t.name)
        room = max(m.memory - sum(self._least(n) for n in m.models) for m in meshes)
        beside = " beside the others" if any(m.models for m in meshes) else ""
        missing = format_bytes(max(1, round(needed - room)))
        return ConfigError(
            "models",
            t.name,
            f"one that fits: it needs {format_bytes(round(needed))} with one request, and finds "
            f"{format_bytes(max(0, round(room)))}{beside}: {missing} are missing",
        )


def _level(rate: float) -> float:
    """Round a rate, so that rates that differ by rounding errors are equal."""
    return float(f"{rate:.6g}")


def _with(mesh: Mesh, models: tuple[str, ...]) -> Mesh:
    return Mesh(mesh.devices, mesh.memory, models)
