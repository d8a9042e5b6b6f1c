"""The controller in virtual time: which devices serve which models, where requests go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ballast.core.cost import StepCosts
from ballast.core.fleet import (
    DeviceLoad,
    FleetAction,
    FleetView,
    Hosting,
    Need,
    Place,
    Room,
)
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.policy.base import FleetPolicy
from ballast.policy.route import Replica, Route, held_prefix
from ballast.sim.device import SimDevice

Told = Callable[[float, FleetAction, str | None], None]
"""(when, what a policy asked for, why it was not done; None: it was)."""
CostsOn = Callable[[str, ModelSpec], StepCosts]
"""(device, model): what its jobs cost there."""


class Controller:
    """Asks the fleet's policy when it wishes to be asked, and does what it says."""

    def __init__(
        self,
        devices: Mapping[str, SimDevice],
        homes: Mapping[str, Sequence[str]],
        route: Route = held_prefix,
    ) -> None:
        """`homes`: by model or adapter, the devices that serve it. Nothing moves until `follow`."""
        self.devices = devices
        self.homes = {name: list(on) for name, on in homes.items()}
        self.placed = self.withdrawn = 0
        """Models that were given one more device since the start, and taken from one."""
        self._route = route
        self._policy: FleetPolicy | None = None
        self._memo: object = None
        self.wake_at: float | None = None
        """When the policy wishes to be asked."""

    def follow(
        self,
        policy: FleetPolicy,
        needs: Sequence[Need],
        rooms: Sequence[Room],
        specs: Sequence[ModelSpec],
        costs: CostsOn,
        told: Told = lambda at, action, refused: None,
    ) -> None:
        """Let `policy` decide from now on. `told` hears of every action."""
        self._policy, self._needs, self._rooms = policy, tuple(needs), tuple(rooms)
        self._specs = {spec.name: spec for spec in specs}
        self._costs, self._told = costs, told
        self._seen: dict[tuple[str, str], float] = {}
        self._seen_at = self.wake_at = 0.0

    def choose(self, submission: Submission) -> str:
        """The device for a request that arrives now; those that serve its model go on till then."""
        names = self.homes[submission.model]
        if len(names) == 1:
            return names[0]
        replicas = []
        for name in names:
            device = self.devices[name]
            device.advance(submission.arrival)
            held = device.held_tokens(submission)
            replicas.append(Replica(name, device.open_requests, held))
        return self._route(replicas)

    def decide(self, now: float) -> None:
        """Ask the policy, and do what it says. Every device has gone on to `now`."""
        assert self._policy is not None
        decision = self._policy(self._view(now), self._memo)
        self._memo, self.wake_at = decision.memo, decision.wake_at
        for action in decision.actions:
            self._told(now, action, self._do(now, action))

    def _do(self, now: float, action: FleetAction) -> str | None:
        """Why it was not done, if it was not."""
        spec, device = self._specs[action.model], self.devices[action.device]
        homes = self.homes[action.model]
        if isinstance(action, Place):
            if action.device in homes:
                return f"{action.device} serves {action.model} already"
            refused = device.join(now, spec, self._costs(action.device, spec))
            if refused is not None:
                return refused
            homes = [*homes, action.device]
            self.placed += 1
        else:
            if homes == [action.device] or action.device not in homes:
                return f"{action.model} is served by {', '.join(homes)}"
            device.leave(now, action.model)
            self._seen.pop((action.device, action.model), None)
            homes = [name for name in homes if name != action.device]
            self.withdrawn += 1
        for served in spec.served:
            self.homes[served.name] = homes
        return None

    def _view(self, now: float) -> FleetView:
        """Work is that since the view before."""
        seconds = max(now - self._seen_at, 1e-9)
        loads = tuple(
            DeviceLoad(room, tuple(self._hosting(room.device, now, seconds)))
            for room in self._rooms
        )
        self._seen_at = now
        return FleetView(now, loads, self._needs)

    def _hosting(self, device: str, now: float, seconds: float) -> list[Hosting]:
        found = []
        for name, m in self.devices[device].state.models.items():
            if device not in self.homes[name]:
                continue
            before = self._seen.get((device, name), 0.0)
            self._seen[device, name] = m.lane_seconds
            work = max(m.lane_seconds - before, 0.0) / seconds
            n_open = len(m.waiting) + len(m.running)
            found.append(Hosting(name, work, n_open, m.late(now)))
        return found
