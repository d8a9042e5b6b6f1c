"""Track which devices serve which models, and call the fleet policy for placement and routing.

Used by `FleetPolicyRunner` in the server and by the simulator's controller. Carries nothing out:
the caller executes the returned actions and reports them by `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ballast.core.fleet import (
    DeviceLoad,
    FleetAction,
    FleetView,
    Hosting,
    LeaseView,
    Need,
    Place,
    PlacementAction,
    Room,
)
from ballast.core.report import DeviceReport
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import Replica, for_prefill

LookAt = Callable[[str], Replica]
"""Function from a device's name to its state for the request that is being routed."""
_STAY = FixedPlacement()


class FleetBook:
    """Keeps the homes of models (the devices that serve each) and the fleet policy's memo.

    `epoch` counts changes of homes. The caller reports an executed action by `settle`.
    """

    def __init__(
        self,
        homes: Mapping[str, Sequence[str]],
        needs: Sequence[Need] = (),
        rooms: Sequence[Room] = (),
        policy: FleetPolicy = _STAY,
    ) -> None:
        """`homes`: by model, the devices that serve it; `needs`: memory that models need of a
        device; `rooms`: budgets of the devices."""
        self.homes = {model: tuple(on) for model, on in homes.items()}
        self.epoch = 0
        self.wake_at = 0.0 if policy.decides else None
        """Time of the next call of the policy, seconds; None: never."""
        self.policy, self._needs, self._rooms = policy, tuple(needs), tuple(rooms)
        self._memo: object = None
        self._seen: dict[tuple[str, str], float] = {}
        """By (device, model): lane seconds up to the last view."""
        self._seen_at = 0.0
        self._forgotten: dict[tuple[str, str], int] = {}
        """By (device, model): blocks forgotten up to the last view."""
        self._copied: dict[str, float] = {}
        """By device: seconds of copies of layers up to the last view."""

    def choose(self, model: str, look_at: LookAt) -> str:
        """Return the device for a request; calls `look_at` only where there are several."""
        homes = self.homes[model]
        if len(homes) == 1:
            return homes[0]
        return self.policy.route(for_prefill([look_at(name) for name in homes]))

    def decide(
        self,
        now: float,
        reports: Mapping[str, DeviceReport],
        leases: Sequence[LeaseView] = (),
        pairs: Sequence[tuple[str, str]] = (),
    ) -> tuple[FleetAction, ...]:
        """Return the policy's actions. `reports`: by device, all as of `now`; `leases`, `pairs`: as
        in `FleetView`."""
        if not self.policy.decides:
            return ()
        view = replace(self._view(now, reports), leases=tuple(leases), pairs=tuple(pairs))
        decision = self.policy(view, self._memo)
        self._memo, self.wake_at = decision.memo, decision.wake_at
        return decision.actions

    def follow(self, homes: Mapping[str, Sequence[str]], needs: Sequence[Need]) -> None:
        """Replace the homes by the actual ones. A difference, as after an operator's command,
        begins a new epoch."""
        found = {model: tuple(on) for model, on in homes.items()}
        if {m: set(on) for m, on in found.items()} != {m: set(on) for m, on in self.homes.items()}:
            self.homes = found
            self.epoch += 1
        self._needs = tuple(needs)

    def objection(self, action: PlacementAction) -> str | None:
        """Return why an action cannot be carried out now; None if it can."""
        homes = self.homes.get(action.model)
        if homes is None:
            return f"there is no model {action.model!r}"
        there = action.device in homes
        if isinstance(action, Place):
            return f"{action.device} serves {action.model} already" if there else None
        others = [name for name in homes if name != action.device]
        return None if there and others else f"{action.model} is served by {', '.join(homes)}"

    def settle(self, action: PlacementAction) -> None:
        """Note that an action has been carried out."""
        homes = self.homes[action.model]
        self.epoch += 1
        if isinstance(action, Place):
            self.homes[action.model] = (*homes, action.device)
        else:
            self.homes[action.model] = tuple(name for name in homes if name != action.device)

    def _view(self, now: float, reports: Mapping[str, DeviceReport]) -> FleetView:
        """Build the policy's view; each model's work is averaged since the last view."""
        seconds = max(now - self._seen_at, 1e-9)
        loads = []
        for room in self._rooms:
            report = reports.get(room.device)
            if report is None:
                continue
            copied = sum(m.copy_seconds for m in report.models)
            before = self._copied.get(room.device, 0.0)
            self._copied[room.device] = copied
            hosting = tuple(self._hosting(report, room.device, seconds))
            loads.append(
                DeviceLoad(
                    room,
                    hosting,
                    report.page_bytes,
                    report.total,
                    report.free + report.reclaiming,
                    max(copied - before, 0.0) / seconds,
                )
            )
        self._seen_at = now
        return FleetView(now, tuple(loads), self._needs)

    def _hosting(self, report: DeviceReport, device: str, seconds: float) -> list[Hosting]:
        found = []
        for m in report.models:
            homed = device in self.homes.get(m.name, ())
            before = self._seen.get((device, m.name), 0.0)
            self._seen[device, m.name] = m.lane_seconds
            work = max(m.lane_seconds - before, 0.0) / seconds
            forgotten = self._forgotten.get((device, m.name), 0)
            self._forgotten[device, m.name] = m.forgotten_blocks
            weights = m.weight_pages * report.page_bytes
            n_open = m.waiting + m.running + m.paused
            hosting = Hosting(m.name, work, n_open, m.late, weights, homed, m.traffic)
            found.append(
                replace(
                    hosting,
                    kv_pages=m.kv_pages,
                    cached_pages=m.cached_pages,
                    borrowed_pages=m.borrowed_pages,
                    waiting=m.waiting,
                    leaving=not homed and m.name in self.homes,
                    forgotten_blocks=max(0, m.forgotten_blocks - forgotten),
                    lacking=m.lacking,
                    lacking_tokens=m.lacking_tokens,
                    longest_tokens=m.longest_tokens,
                )
            )
        return found
