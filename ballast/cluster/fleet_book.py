"""Which devices serve which models, and the fleet policy's decisions; live and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ballast.core.fleet import (
    DeviceLoad,
    FleetAction,
    FleetView,
    Hosting,
    Need,
    Place,
    Room,
)
from ballast.core.report import DeviceReport
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import Replica, for_prefill

LookAt = Callable[[str], Replica]
"""Returns the state of a device, by its name, for the request at hand."""
_STAY = FixedPlacement()


class FleetBook:
    """The homes of models; asks the fleet policy for a request's device and for actions.

    `epoch` counts changes of homes. An action that was carried out is reported by `settle`.
    """

    def __init__(
        self,
        homes: Mapping[str, Sequence[str]],
        needs: Sequence[Need] = (),
        rooms: Sequence[Room] = (),
        policy: FleetPolicy = _STAY,
    ) -> None:
        """`homes`: by model, the devices that serve it; `needs`, `rooms`: what models take of a
        device, and what devices have."""
        self.homes = {model: tuple(on) for model, on in homes.items()}
        self.epoch = 0
        self.wake_at = 0.0 if policy.moves else None
        """When the policy is to be asked next, seconds; None: never."""
        self.policy, self._needs, self._rooms = policy, tuple(needs), tuple(rooms)
        self._memo: object = None
        self._seen: dict[tuple[str, str], float] = {}
        """By device and model, lane seconds in the last view."""
        self._seen_at = 0.0

    def choose(self, model: str, look_at: LookAt) -> str:
        """Return the device for a request; calls `look_at` only where there are several."""
        homes = self.homes[model]
        if len(homes) == 1:
            return homes[0]
        return self.policy.route(for_prefill([look_at(name) for name in homes]))

    def decide(self, now: float, reports: Mapping[str, DeviceReport]) -> tuple[FleetAction, ...]:
        """Return the policy's actions. `reports`: by device, all as of `now`."""
        if not self.policy.moves:
            return ()
        decision = self.policy(self._view(now, reports), self._memo)
        self._memo, self.wake_at = decision.memo, decision.wake_at
        return decision.actions

    def follow(self, homes: Mapping[str, Sequence[str]], needs: Sequence[Need]) -> None:
        """Take over the actual homes; a difference, such as an operator's order, is a new epoch."""
        found = {model: tuple(on) for model, on in homes.items()}
        if {m: set(on) for m, on in found.items()} != {m: set(on) for m, on in self.homes.items()}:
            self.homes = found
            self.epoch += 1
        self._needs = tuple(needs)

    def objection(self, action: FleetAction) -> str | None:
        """Return why an action cannot be carried out now; None if it can."""
        homes = self.homes.get(action.model)
        if homes is None:
            return f"there is no model {action.model!r}"
        there = action.device in homes
        if isinstance(action, Place):
            return f"{action.device} serves {action.model} already" if there else None
        others = [name for name in homes if name != action.device]
        return None if there and others else f"{action.model} is served by {', '.join(homes)}"

    def settle(self, action: FleetAction) -> None:
        """Note that an action has been carried out."""
        homes = self.homes[action.model]
        self.epoch += 1
        if isinstance(action, Place):
            self.homes[action.model] = (*homes, action.device)
        else:
            self.homes[action.model] = tuple(name for name in homes if name != action.device)

    def _view(self, now: float, reports: Mapping[str, DeviceReport]) -> FleetView:
        """Build the policy's view; work is counted since the last one."""
        seconds = max(now - self._seen_at, 1e-9)
        loads = tuple(
            DeviceLoad(room, tuple(self._hosting(reports[room.device], room.device, seconds)))
            for room in self._rooms
            if room.device in reports
        )
        self._seen_at = now
        return FleetView(now, loads, self._needs)

    def _hosting(self, report: DeviceReport, device: str, seconds: float) -> list[Hosting]:
        found = []
        for m in report.models:
            homed = device in self.homes.get(m.name, ())
            before = self._seen.get((device, m.name), 0.0)
            self._seen[device, m.name] = m.lane_seconds
            work = max(m.lane_seconds - before, 0.0) / seconds
            weights = m.weight_pages * report.page_bytes
            n_open = m.waiting + m.running + m.paused
            found.append(Hosting(m.name, work, n_open, m.late, weights, homed, m.traffic))
        return found
