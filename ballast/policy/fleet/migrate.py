"""Migrate models, one at a time, to where KV pressure is least: Prism's controller, section 6.1.

The fleet policy of placement `kvpr` (preset `prism`). Only returns actions: the controller loads
weights at the new device first, and withdraws the old one afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ballast.core.fleet import (
    DeviceLoad,
    FleetAction,
    FleetDecision,
    FleetView,
    Hosting,
    Need,
    Place,
    Room,
    Withdraw,
)
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import spread
from ballast.policy.fleet.kv_pressure import Filling, ModelDemand
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.policy.fleet.replica_choice import Replica, held_prefix
from ballast.policy.requirements import Requirements


@dataclass(frozen=True, slots=True)
class Migrating:
    """Memo: migrations that have begun."""

    leaving: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """By migrating model, the device that it leaves, and when the migration began, in seconds."""


@dataclass(frozen=True, slots=True)
class LeastPressure(FleetPolicy):
    """Every `every` seconds, start at most one migration that lowers the highest KV pressure.

    A model's demand is its token rate over about the last minute (`core.traffic.WINDOW`), in bytes
    of KV, over its TPOT service level. A device's KV pressure is the demand of its models over the
    memory that is left by the weights of models requested lately (idle ones can be evicted). Of the
    models on the device with the highest pressure, the one moves whose move lowers that pressure
    most, to the device where it is then least, if it is lower by more than `threshold` of itself.
    The new device is added while the old one serves on. When the weights are there, new requests go
    only there, and the model leaves the old device once its open requests have ended. If the
    weights have not come after `patience` seconds, the model stays where it was.

    If no such move exists, a model without requests whose weights are on no device moves to where
    they would leave the least pressure: there it is activated with its next request.
    """

    every: float = 10.0
    threshold: float = 0.2
    patience: float = 60.0

    @property
    def requires(self) -> Requirements:
        return Requirements(following=True)

    @property
    def moves(self) -> bool:
        return True

    def place(self, needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, list[str]]:
        """Place models by weights only: no requests have arrived yet."""
        return spread(needs, rooms, by_work=False)

    def route(self, replicas: Sequence[Replica]) -> str:
        """Return a device where the weights are resident: at the target of a migration they may be
        loading."""
        return held_prefix([r for r in replicas if r.resident] or replicas)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        leaving = dict(memo.leaving) if isinstance(memo, Migrating) else {}
        actions: list[FleetAction] = []
        for model, (source, since) in list(leaving.items()):
            at = homes(model, view)
            targets = [d for d in at if d != source]
            if not targets or source not in at:
                del leaving[model]  # refused, or an operator has moved it
            elif not at[source].weights or any(at[d].weights for d in targets):
                actions.append(Withdraw(model, source, "its weights are where it migrates to"))
                del leaving[model]
            elif view.now >= since + self.patience:
                why = f"its weights have not come in {self.patience:g} s"
                actions += [Withdraw(model, target, why) for target in targets]
                del leaving[model]
        if not leaving and not actions:
            move = best_move(view, self.threshold)
            if move is not None:
                actions.append(Place(move.model, move.target, move.why, activate=move.warm))
                leaving[move.model] = move.source, view.now
        return FleetDecision(tuple(actions), Migrating(leaving), view.now + self.every)


@dataclass(frozen=True, slots=True)
class Move:
    """A possible move of a model from one device to another."""

    model: str
    source: str
    target: str
    highest: float
    """KV pressure after the move, the higher one of the two devices."""
    warm: bool = False
    """Whether the weights are loaded at the target at once, as requests are open."""
    why: str = ""


def homes(model: str, view: FleetView) -> dict[str, Hosting]:
    """Return, by device that serves it, the state of a model there."""
    return {d.name: h for d in view.devices for h in d.hosting if h.model == model and h.homed}


def claim_of(need: Need, h: Hosting) -> ModelDemand:
    """Return a model's demand on one of its devices. Without requests lately its weights count as
    0, as they can be evicted, unless it is pinned."""
    tokens = h.traffic.rate * (h.traffic.prompt_tokens + h.traffic.output_tokens)
    demand = tokens * need.kv_bytes_per_token / need.tpot if math.isfinite(need.tpot) else 0.0
    used = demand > 0 or need.pinned or h.open_requests > 0
    return ModelDemand(need.model, float(need.weights) if used else 0.0, demand)


def best_move(view: FleetView, threshold: float) -> Move | None:
    """Return the move of one model that lowers KV pressure most, with the reason; None: none lowers
    it by more than `threshold` of what it is."""
    needs = {need.model: need for need in view.needs}
    held = {d.name: _filling(d, needs) for d in view.devices}
    if not held:
        return None
    source = max(held.values(), key=lambda f: f.pressure)
    name = source.device.name
    there = next(d for d in view.devices if d.name == name)
    moves = []
    for h in there.hosting:
        need = needs.get(h.model)
        if need is None or list(homes(h.model, view)) != [name]:
            continue
        claim = claim_of(need, h)
        if claim.demand:
            less = _without(source, claim)
            moves += _moves(need, claim, name, held, less.pressure)
    chosen = _preferred(moves, source.pressure, threshold)
    if chosen is None:
        return _idle(view, needs, held, threshold)
    return replace(chosen, warm=True)


def _idle(
    view: FleetView, needs: Mapping[str, Need], held: Mapping[str, Filling], threshold: float
) -> Move | None:
    """Return the move of a model without requests whose weights are on no device."""
    found = []
    for d in view.devices:
        for h in d.hosting:
            need = needs.get(h.model)
            if need is None or h.weights or list(homes(h.model, view)) != [d.name]:
                continue
            if claim_of(need, h).weights:
                continue
            back = ModelDemand(h.model, float(need.weights), 0.0)
            here = held[d.name].with_part(back).pressure
            move = _preferred(_moves(need, back, d.name, held, 0.0), here, threshold)
            if move is not None:
                found.append(
                    (move.highest / here if math.isfinite(here) else 0.0, move.model, move)
                )
    return min(found)[2] if found else None


def _moves(
    need: Need, claim: ModelDemand, source: str, held: Mapping[str, Filling], left: float
) -> list[Move]:
    """Return the moves to all devices that have room. `left`: KV pressure that the source keeps."""
    found = []
    for target, filling in held.items():
        more = filling.with_part(claim)
        beside = max(0, need.least - need.weights)
        if target != source and more.weights + beside <= filling.device.memory:
            found.append(Move(need.model, source, target, max(left, more.pressure)))
    return found


def _preferred(moves: Sequence[Move], before: float, threshold: float) -> Move | None:
    """Return the move after which pressure is least, if that gains more than `threshold`."""
    ordered = sorted(moves, key=lambda m: (m.highest, m.model, m.target))
    if not ordered or not before or ordered[0].highest >= (1 - threshold) * before:
        return None
    return replace(ordered[0], why=_why(ordered, before))


def _why(moves: Sequence[Move], before: float) -> str:
    """Return the reason for the first of some moves, with the second one for comparison."""
    first = moves[0]
    gain = f"KV pressure of {first.source} {_lower(first, before)}"
    if len(moves) == 1:
        return gain
    other = moves[1]
    return f"{gain}; {other.model} to {other.target}: {_lower(other, before)}"


def _lower(move: Move, before: float) -> str:
    if math.isinf(before):
        return "finite again" if math.isfinite(move.highest) else "as before"
    return f"{100 * (move.highest / before - 1):+.0f} %"


def _filling(d: DeviceLoad, needs: Mapping[str, Need]) -> Filling:
    """Return a device filled with its models."""
    filling = Filling(PlacementDevice(d.name, float(d.room.bytes)))
    for h in d.hosting:
        if h.homed and h.model in needs:
            filling = filling.with_part(claim_of(needs[h.model], h))
    return filling


def _without(filling: Filling, claim: ModelDemand) -> Filling:
    weights, demand = filling.weights - claim.weights, filling.demand - claim.demand
    return Filling(filling.device, weights, demand)
