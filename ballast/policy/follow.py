"""Models follow the load: a device that cannot keep up shares a model with one that can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ballast.core.fleet import (
    DeviceLoad,
    FleetAction,
    FleetDecision,
    FleetView,
    Need,
    Place,
    Withdraw,
)


@dataclass(frozen=True, slots=True)
class Spare:
    """Models that could do with a device fewer."""

    since: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """By model, in seconds."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Looks every `every` seconds.

    A device is behind if requests are late on it. One of its models (that with the most late ones)
    is then served by one more device: of those that are not behind, have at most half as many open
    requests, and room beside the weights in use there, that with the fewest. A model with several
    devices that has needed less than `low` of each of the others for `patience` seconds leaves the
    busiest. So a model moves: first it has two devices, then one.
    """

    every: float = 5.0
    low: float = 0.4
    patience: float = 30.0

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        actions: list[FleetAction] = []
        taken: set[str] = set()
        needs = {need.model: need for need in view.needs}
        behind = [d for d in view.devices if d.late]
        for device in sorted(behind, key=lambda d: (-d.late, d.name)):
            found = self._relief(device, view, needs, taken)
            if found is not None:
                actions.append(found)
                taken |= {found.device, found.model}
        spare = self._spare(view, memo if isinstance(memo, Spare) else Spare())
        for model, at in spare.items():
            if view.now >= at + self.patience and model not in taken:
                homes = [d for d in view.devices if d.serves(model)]
                busiest = max(homes, key=lambda d: (d.late, d.work))
                why = f"{len(homes) - 1} of its {len(homes)} devices are enough"
                actions.append(Withdraw(model, busiest.name, why))
        gone = {a.model for a in actions}
        since = {model: at for model, at in spare.items() if model not in gone}
        return FleetDecision(tuple(actions), Spare(since), view.now + self.every)

    def _relief(
        self, device: DeviceLoad, view: FleetView, needs: Mapping[str, Need], taken: set[str]
    ) -> Place | None:
        """One more device for one of this device's models."""
        for h in sorted(device.hosting, key=lambda h: (-h.late, -h.open_requests, h.model)):
            if not h.late or h.model in taken:
                continue
            helpers = [
                d
                for d in view.devices
                if not d.late
                and not d.serves(h.model)
                and d.name not in taken
                and _in_use(d, needs) + needs[h.model].least <= d.room.bytes
                and 2 * d.open_requests <= device.open_requests
            ]
            if helpers:
                chosen = min(helpers, key=lambda d: (d.open_requests, d.work, len(d.hosting)))
                return Place(h.model, chosen.name, f"{h.late} requests are late on {device.name}")
        return None

    def _spare(self, view: FleetView, before: Spare) -> dict[str, float]:
        spare: dict[str, float] = {}
        for need in view.needs:
            own = [h for d in view.devices for h in d.hosting if h.model == need.model]
            enough = sum(h.work for h in own) <= self.low * (len(own) - 1)
            if len(own) > 1 and enough and not any(h.late for h in own):
                spare[need.model] = before.since.get(need.model, view.now)
        return spare


def _in_use(device: DeviceLoad, needs: Mapping[str, Need]) -> int:
    """Bytes of the weights of models that have requests there."""
    return sum(needs[h.model].weights for h in device.hosting if h.open_requests)
