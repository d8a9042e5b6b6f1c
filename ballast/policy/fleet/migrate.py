"""Place models anew while they serve, where KV pressure is least: Prism, 6.1, Algorithm 1, online.

The fleet policy of placement `kvpr` (preset `prism`). Only returns actions: the controller loads
weights at the new device first, and withdraws the old one afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ballast.core.fleet import (
    DeviceCapacity,
    FleetDecision,
    FleetView,
    ModelDemand,
    ModelLoad,
    Place,
    PlacementAction,
    Withdraw,
)
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import spread
from ballast.policy.fleet.kv_pressure import Fillings, KvDemand, PlacementChoice
from ballast.policy.fleet.placement_problem import PlacementDevice
from ballast.policy.fleet.replica_choice import Replica, held_prefix
from ballast.policy.requirements import Requirements


@dataclass(frozen=True, slots=True)
class MigrationMemo:
    """Memo: migrations that have begun."""

    leaving: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """By migrating model, the device that it leaves, and when the migration began, in seconds."""


@dataclass(frozen=True, slots=True)
class LeastPressure(FleetPolicy):
    """Every `every` seconds, place all models anew, and migrate those whose device changes.

    A model's demand is its token rate over about the last minute (`core.traffic.WINDOW`), in bytes
    of KV, over its TPOT service level. A device's KV pressure is the demand of its models over the
    memory that their weights leave. Models are taken by demand, the greatest first, and each gets
    the device of least pressure, beside those that were taken before it; it stays where it is
    unless that lowers the pressure there by more than `threshold` of itself.

    Weights of a model without requests count as none, as they can be evicted. If they have been, it
    is taken last, and gets the device of least pressure: there it is activated with its next
    request. While they are resident it stays, as moving it would gain nothing.

    The new device is added while the old one serves on. When the weights are there, new requests go
    only there, and the model leaves the old device once its open requests have ended. If the
    weights have not come after `patience` seconds, the model stays where it was. Until then it
    counts at the new device. A host to which they would take longer over the network gets none.
    """

    options: ClassVar = ("every", "threshold")
    every: float = 10.0
    threshold: float = 0.2
    patience: float = 60.0

    @property
    def requires(self) -> Requirements:
        return Requirements(following=True)

    @property
    def moves(self) -> bool:
        return True

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        """Place models by weights only: no requests have arrived yet."""
        return spread(needs, rooms, by_work=False)

    def route(self, replicas: Sequence[Replica]) -> str:
        """Return a device where the weights are resident: at the target of a migration they may be
        loading."""
        return held_prefix([r for r in replicas if r.resident] or replicas)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        before = memo if isinstance(memo, MigrationMemo) else MigrationMemo()
        homes = homes_of(view)
        leaving, actions = under_way(before, homes, view.now, self.patience)
        withdrawn = {action.model for action in actions}
        for move in moves(view, homes, self.threshold, leaving, withdrawn, self.patience):
            actions.append(Place(move.model, move.target, move.why, activate=move.warm))
            leaving[move.model] = move.source, view.now
        return FleetDecision(tuple(actions), MigrationMemo(leaving), view.now + self.every)


def under_way(
    memo: MigrationMemo, homes: Mapping[str, ModelHomes], now: float, patience: float
) -> tuple[dict[str, tuple[str, float]], list[PlacementAction]]:
    """Return the migrations that have not ended, and the actions that end others: a model leaves
    its old device when its weights are at the new one, or the new one if they have not come in
    `patience` seconds. These count as left in `homes`."""
    leaving = dict(memo.leaving)
    actions: list[PlacementAction] = []
    for model, (source, since) in memo.leaving.items():
        at = homes[model].at
        targets = [d for d in at if d != source]
        if not targets or source not in at:
            del leaving[model]  # refused, or an operator has moved it
        elif not at[source].weights or any(at[d].weights for d in targets):
            actions.append(Withdraw(model, source, "its weights are where it migrates to"))
            homes[model].leave(source)
            del leaving[model]
        elif now >= since + patience:
            why = f"its weights have not come in {patience:g} s"
            for target in targets:
                actions.append(Withdraw(model, target, why))
                homes[model].leave(target)
            del leaving[model]
    return leaving, actions


@dataclass(frozen=True, slots=True)
class Move:
    """A model whose device changes."""

    model: str
    source: str
    target: str
    warm: bool
    """Whether the weights are loaded at the target at once: unless they have been evicted, and no
    request is open."""
    why: str


@dataclass(slots=True)
class ModelHomes:
    """The devices of a model, each with its state there."""

    at: dict[str, ModelLoad] = field(default_factory=dict)
    left: list[ModelLoad] = field(default_factory=list)
    """Its state on devices that it is leaving."""

    def leave(self, device: str) -> None:
        """Count the model as leaving a device."""
        self.left.append(self.at.pop(device))


def homes_of(view: FleetView) -> dict[str, ModelHomes]:
    """Return the devices of all models, by model."""
    found: dict[str, ModelHomes] = defaultdict(ModelHomes)
    for d in view.devices:
        for h in d.hosting:
            if h.homed:
                found[h.model].at[d.name] = h
            elif h.leaving:
                found[h.model].left.append(h)
    return found


def demand_of(need: ModelDemand, hosting: Iterable[ModelLoad]) -> tuple[float, bool]:
    """Return a model's demand on some of its devices, and whether its weights count there: unless
    it has no requests lately, as they can be evicted then, and is not pinned."""
    tokens, is_open = 0.0, False
    for h in hosting:
        t = h.traffic
        tokens += t.rate * (t.prompt_tokens + t.output_tokens)
        is_open = is_open or h.open_requests > 0
    demand = tokens * need.kv_bytes_per_token / need.tpot if math.isfinite(need.tpot) else 0.0
    return demand, demand > 0 or need.pinned or is_open


class _Claim(NamedTuple):
    """A model on one of its devices."""

    need: ModelDemand
    here: str
    at: Mapping[str, ModelLoad]
    stays: bool
    demand: KvDemand


def _claims(
    needs: Iterable[ModelDemand],
    homes: Mapping[str, ModelHomes],
    leaving: Mapping[str, tuple[str, float]],
    fixed: Collection[str],
) -> list[_Claim]:
    """Return what is placed, in its order: by demand, those without requests lately last."""
    found: list[tuple[bool, float, str, _Claim]] = []
    for need in needs:
        model = need.model
        if model not in homes:
            continue
        home = homes[model]
        at, left = home.at, leaving.get(model, ("", 0.0))[0]
        goes_to = [d for d in at if d != left]
        states = [*at.values()]
        demand, used = demand_of(need, [*states, *home.left] if home.left else states)
        idle = not (used and need.weights)
        stays = len(at) > 1 or model in fixed
        evicted = idle and not stays and len(at) == 1 and not states[0].weights
        for here in [*at] if evicted else goes_to:
            if len(goes_to) > 1:
                demand, used = demand_of(need, (at[here],))
            weights = float(need.weights) if used or evicted else 0.0
            claim = KvDemand(model, weights, demand)
            rests = stays or (idle and not weights)
            found.append((idle, -demand, model, _Claim(need, here, at, rests, claim)))
    found.sort(key=lambda c: c[:3])
    return [claim for *_, claim in found]


def moves(
    view: FleetView,
    homes: Mapping[str, ModelHomes],
    threshold: float,
    leaving: Mapping[str, tuple[str, float]],
    fixed: Collection[str],
    patience: float,
) -> list[Move]:
    """Run Algorithm 1 over all models, of which those with several devices, the `fixed` ones and
    idle ones that are resident stay, and those that are `leaving` a device count at the other one.
    Return the models whose device changes; none goes where its weights take longer than `patience`
    seconds over the network."""
    held = Fillings([PlacementDevice(d.name, float(d.room.bytes)) for d in view.devices])
    found = []
    for claim in _claims(view.needs, homes, leaving, fixed):
        here, demand, need = claim.here, claim.demand, claim.need
        if claim.stays:
            held.add(demand, here)
            continue
        beside, far = max(0, need.least - need.weights), _far(view, need, here, patience)
        choice = held.choose(demand, here, threshold, beside, far)
        target = here if choice is None else choice.device
        held.add(demand, target)
        if choice is not None and target != here:
            state = claim.at[here]
            warm = bool(state.weights or state.open_requests)
            found.append(Move(need.model, here, target, warm, _why(choice, here)))
    return found


def _far(view: FleetView, need: ModelDemand, here: str, patience: float) -> list[str]:
    """Return the devices on hosts that a model's weights do not reach in time."""
    if need.weights <= patience * view.network:
        return []
    near = {d.room.host for d in view.devices if d.serves(need.model)}
    return [d.name for d in view.devices if d.name != here and d.room.host not in near]


def _why(choice: PlacementChoice, here: str) -> str:
    if math.isinf(choice.before):
        return f"KV pressure of {here}: its weights leave no memory for KV"
    gain = 100 * (choice.pressure / choice.before - 1)
    return f"KV pressure beside those of greater demand: {gain:+.0f} % of that of {here}"
