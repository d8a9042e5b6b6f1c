"""Add a device to a model that is late where it is, and withdraw devices that a model does not
need.

The fleet policy of placements `follow` and `both`. Requests that already wait stay on their device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetAction,
    FleetDecision,
    FleetView,
    ModelDemand,
    ModelLoad,
    Place,
    Withdraw,
)
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import spread
from ballast.policy.requirements import Requirements


@dataclass(frozen=True, slots=True)
class ReplicateMemo:
    """Memo: times by model, in seconds."""

    spare: Mapping[str, float] = field(default_factory=dict)
    """Since when the model could do with one device fewer."""
    placed: Mapping[str, float] = field(default_factory=dict)
    """When the model last got one more device."""


@dataclass(frozen=True, slots=True)
class ReplicateUnderLoad(FleetPolicy):
    """Every `every` seconds, add devices to late models, and withdraw devices that models do not
    need.

    A device is behind if requests are late on it. The model with the most late requests there gets
    one more device: of the devices that are not behind, have at most half as many open requests,
    and room beside the weights in use there, the one whose host has the weights first, and of these
    the one with the fewest open requests. Requests that wait stay where they are, so a model gets
    no further device for `settling` seconds.

    A model leaves one of its devices after `patience` seconds in which its work would have filled
    each of the others for at most `low`: the one without its weights, else the busiest, else the
    last. So a model moves by having two devices first, then one. `by_work`: place models at the
    start as `FixedPlacement` does.
    """

    every: float = 5.0
    settling: float = 10.0
    low: float = 0.4
    patience: float = 30.0
    by_work: bool = False

    @property
    def requires(self) -> Requirements:
        return Requirements(following=True)

    @property
    def moves(self) -> bool:
        return True

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return spread(needs, rooms, by_work=self.by_work)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        before = memo if isinstance(memo, ReplicateMemo) else ReplicateMemo()
        actions: list[FleetAction] = []
        placed = {m: at for m, at in before.placed.items() if view.now < at + self.settling}
        changed = set(placed)
        needs = {need.model: need for need in view.needs}
        for device in sorted(view.devices, key=lambda d: (-d.late, d.name)):
            found = _relief(device, view, needs, changed)
            if found is not None:
                actions.append(found)
                changed |= {found.device, found.model}
                placed[found.model] = view.now
        spare = self._spare(view, before)
        for model, at in list(spare.items()):
            if view.now >= at + self.patience and model not in changed:
                actions.append(_leave(model, view))
                del spare[model]
        return FleetDecision(tuple(actions), ReplicateMemo(spare, placed), view.now + self.every)

    def _spare(self, view: FleetView, before: ReplicateMemo) -> dict[str, float]:
        spare: dict[str, float] = {}
        homes: dict[str, list[ModelLoad]] = defaultdict(list)
        for device in view.devices:
            for h in device.hosting:
                if h.homed:
                    homes[h.model].append(h)
        for need in view.needs:
            own = homes.get(need.model, ())
            enough = sum(h.work for h in own) <= self.low * (len(own) - 1)
            if len(own) > 1 and enough and not any(h.late for h in own):
                spare[need.model] = before.spare.get(need.model, view.now)
        return spare


def _relief(
    device: DeviceLoad, view: FleetView, needs: Mapping[str, ModelDemand], changed: set[str]
) -> Place | None:
    """Return one more device for one of a device's models with late requests, if there is one."""
    for h in sorted(device.hosting, key=lambda h: (-h.late, -h.open_requests, h.model)):
        if not h.late or not h.homed or h.model in changed:
            continue
        helpers = [
            d
            for d in view.devices
            if not d.late
            and not d.serves(h.model)
            and d.name not in changed
            and _in_use(d, needs) + needs[h.model].least <= d.room.bytes
            and 2 * d.open_requests <= device.open_requests
        ]
        if helpers:
            seconds = {d.name: view.seconds_to_host(needs[h.model], d) for d in helpers}
            chosen = min(
                helpers,
                key=lambda d: (seconds[d.name], d.open_requests, d.work, len(d.hosting)),
            )
            return Place(h.model, chosen.name, f"{h.late} requests are late on {device.name}")
    return None


def _leave(model: str, view: FleetView) -> Withdraw:
    """Return the withdrawal of a model from one of its devices."""
    homes = _homes(model, view)
    last = len(homes) - 1
    chosen, _ = homes[
        max(range(len(homes)), key=lambda i: (homes[i][1].weights == 0, homes[i][1].work, i))
    ]
    return Withdraw(model, chosen.name, f"{last} of its {last + 1} devices are enough")


def _homes(model: str, view: FleetView) -> list[tuple[DeviceLoad, ModelLoad]]:
    found = ((d, h) for d in view.devices for h in d.hosting)
    return [(d, h) for d, h in found if h.model == model and h.homed]


def _in_use(device: DeviceLoad, needs: Mapping[str, ModelDemand]) -> int:
    """Return the bytes of the weights of models that have requests on a device, or are pinned."""
    used = 0
    for h in device.hosting:
        need = needs.get(h.model)
        if h.open_requests or (need is not None and need.pinned):
            used += h.weights if need is None else need.weights
    return used
