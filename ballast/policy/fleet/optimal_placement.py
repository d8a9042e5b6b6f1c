"""Find the placement with the least KV pressure by CP-SAT: what Prism's Algorithm 1 approximates.

Whether models can be placed so that no device has a KVPR above r is a packing problem with linear
constraints: on each device, demand + r x weights of its models is at most r x its memory. The least
r is found by bisection: a placement that is found lowers the upper end to its own KVPR, a proof
that there is none raises the lower. The search starts from the greedy placement and a bound that
needs no search. Then, of the placements with that KVPR, it seeks one that moves fewest bytes.

One thread, a fixed seed and a limit of deterministic time: equal problems have equal answers. Used
by the simulator's placement answers to judge the greedy placement; too slow for a device's loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ballast.core.errors import ConfigError, install_extra
from ballast.policy.fleet.kv_pressure import DeviceFill, KvDemand, greedy, max_pressure
from ballast.policy.fleet.placement_problem import Homes, PlacementDevice

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

SCALE = 10**9
"""Units of the largest device's memory in which packing is exact."""
GAP = 2e-4
"""Relative gap to the least KVPR at which the search ends."""
EFFORT = 6.0
"""Default limit of the whole search, in deterministic seconds."""
STEP_EFFORT = 3.0
"""Limit of one packing problem, in deterministic seconds."""
FIRST_EFFORT = 0.5
"""Limit of the first packing problem, in deterministic seconds."""
MOVING_EFFORT = 1.0
"""Limit of the search for fewer moves, in deterministic seconds."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best placement found."""

    homes: Homes
    max_kvpr: float
    lower_bound: float
    """Proven bound: no placement has a lower KVPR on its worst device."""

    @property
    def gap(self) -> float:
        """Largest possible distance of the answer above the optimum, relative to the bound."""
        return self.max_kvpr / self.lower_bound - 1 if self.lower_bound else 0.0


def optimal(
    claims: Sequence[KvDemand], devices: Sequence[PlacementDevice], effort: float = EFFORT
) -> Optimum:
    """Place every model with the least KVPR on the worst device, then with the fewest bytes moved.

    `effort`: deterministic seconds of search, about the seconds of a slow core; when they are over,
    the best placement so far is the answer. The search starts from the greedy placement. Raises
    ConfigError as `greedy` if no placement is found, and where OR-Tools is not installed.
    """
    best = _any(claims, devices)
    stay = _stay(claims, devices)
    if stay is not None and max_pressure(claims, devices, stay) <= max_pressure(
        claims, devices, best
    ):
        best = stay
    high, low = max_pressure(claims, devices, best), lower_bound(claims, devices)
    spent, trying = 0.0, low
    while high > low * (1 + GAP) and spent < effort:
        # The bound itself is tried first: where popular models decide, it is often reached.
        middle = max(trying, low) + (high - max(trying, low)) / 2 if spent else low * (1 + GAP / 2)
        packing = _Packing(claims, devices, middle)
        most = STEP_EFFORT if spent else FIRST_EFFORT
        found = packing.solve(best, min(most, effort - spent))
        spent += max(1e-3, packing.effort)
        if found is not None:
            best, high = found, max_pressure(claims, devices, found)
            trying = low
        elif packing.proven:
            low = max(low, middle * (1 - 2 / SCALE))
        elif high - middle <= GAP * middle:
            break
        else:
            trying = max(trying, middle)
    if any(c.devices for c in claims) and high > 0:
        packing = _Packing(claims, devices, high * (1 + 1e-9), moves=True)
        fewer = packing.solve(best, MOVING_EFFORT)
        if fewer is not None:
            best, high = fewer, max_pressure(claims, devices, fewer)
    return Optimum(best, high, min(low, high))


def lower_bound(claims: Sequence[KvDemand], devices: Sequence[PlacementDevice]) -> float:
    """Return a KVPR that no placement can be below: all demand over all memory that weights leave,
    and each model alone on the largest device."""
    room = sum(d.memory for d in devices) - sum(c.weights for c in claims)
    total = sum(c.demand for c in claims)
    found = total / room if room > 0 else math.inf
    largest = max(devices, key=lambda d: d.memory)
    return max([found, *(DeviceFill(largest).with_part(c).pressure for c in claims)])


def _any(claims: Sequence[KvDemand], devices: Sequence[PlacementDevice]) -> Homes:
    """Return the greedy placement, or if it finds none any that has room for the weights."""
    try:
        return greedy(claims, devices)
    except ConfigError:
        found = _Packing(claims, devices, math.inf).solve({}, STEP_EFFORT)
        if found is None or math.isinf(max_pressure(claims, devices, found)):
            raise
        return found


def _stay(
    claims: Sequence[KvDemand], devices: Sequence[PlacementDevice]
) -> dict[str, tuple[str, ...]] | None:
    """Return the present placement, if all models are placed and their KVPR is finite."""
    if not all(len(c.devices) == c.parts for c in claims):
        return None
    homes = {c.name: c.devices for c in claims}
    return homes if math.isfinite(max_pressure(claims, devices, homes)) else None


class _Packing:
    """Packing problem: whether models can be placed with no KVPR above a limit."""

    def __init__(
        self,
        claims: Sequence[KvDemand],
        devices: Sequence[PlacementDevice],
        limit: float,
        moves: bool = False,
    ) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            needed = f"it needs OR-Tools ({error}): {install_extra('placement')}"
            raise ConfigError("algorithm", "optimal", needed) from None
        self.effort = 0.0
        self.proven = False
        """Whether the last search has proven that they cannot."""
        self._claims, self._devices, self._cp = claims, devices, cp_model
        self._model = cp_model.CpModel()
        self._on: dict[tuple[str, str], cp_model.IntVar] = {
            (c.name, d.name): self._model.new_bool_var(f"{c.name} on {d.name}")
            for c in claims
            for d in devices
        }
        for c in claims:
            self._model.add(sum(self._on[c.name, d.name] for d in devices) == c.parts)
        unit = max(d.memory for d in devices) / SCALE
        size = {c.name: math.ceil((c.part_weights + c.part_demand / limit) / unit) for c in claims}
        for d in devices:
            room = math.floor(d.memory / unit)
            self._model.add(sum(size[c.name] * self._on[c.name, d.name] for c in claims) <= room)
        if moves:
            self._model.minimize(
                sum(
                    math.ceil(c.part_weights / unit) * self._on[c.name, d.name]
                    for c in claims
                    for d in devices
                    if c.devices and d.name not in c.devices
                )
            )
        elif len({d.memory for d in devices}) == 1:
            self._break_symmetry(sorted(claims, key=lambda c: -size[c.name]))

    def _break_symmetry(self, claims: Sequence[KvDemand]) -> None:
        """Require equal devices to be used in their order: the largest models first, each on a
        device that is used already or on the next."""
        for i, c in enumerate(claims):
            for before, d in pairwise(self._devices):
                earlier = [self._on[other.name, before.name] for other in claims[: i + 1]]
                self._model.add_bool_or([*earlier, ~self._on[c.name, d.name]])

    def solve(self, hint: Homes, effort: float) -> dict[str, tuple[str, ...]] | None:
        """Return a placement, if one is found in `effort` deterministic seconds."""
        for (model, device), on in self._on.items():
            if hint:
                self._model.add_hint(on, device in hint[model])
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(self._model)
        self.effort = solver.response_proto.deterministic_time
        self.proven = status == self._cp.INFEASIBLE
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None
        return {
            c.name: tuple(d.name for d in self._devices if solver.value(self._on[c.name, d.name]))
            for c in self._claims
        }
