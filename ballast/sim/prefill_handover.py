"""Simulate disaggregated prefill: hand requests from prefill devices to decode devices.

A device with `role: prefill` computes a request up to its first token. Once a block of its KV is
full, the request migrates with its KV to a device of its model without that role, as live
(`ballast.cluster.relocation.Relocation.first_token`). If that device lacks the weights it loads
them first; if they do not come in time, or there is no room for the KV, the request finishes on the
prefill device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ballast.core.actions import Activate
from ballast.core.errors import ConfigError
from ballast.core.event import Output, TokenOutput
from ballast.core.request import Request, RequestState, Submission
from ballast.core.settings import Role
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.replica_choice import Replica, for_decode
from ballast.sim.device import SimDevice
from ballast.sim.lending import WAY
from ballast.sim.migration import Movers

PATIENCE = 10.0
"""Seconds for weights to come to a device that decodes."""
POLL_SECONDS = 0.02
"""Seconds between two checks whether a request can move."""
GOING = (RequestState.WAITING, RequestState.RUNNING, RequestState.PAUSED)


def role_of(device: SimDevice) -> Role:
    """The part of a request that the device computes: prefill, decode or both."""
    return device.state.settings.role


def replica_of(name: str, device: SimDevice, submission: Submission) -> Replica:
    """Describe a device as a replica for a request, as of the device's clock."""
    held, resident = device.held_tokens(submission), device.has_weights(submission.model)
    prompt = len(submission.prompt)
    return Replica(name, device.open_requests, held, resident, role_of(device), prompt)


def check_roles(roles: Mapping[str, Role], moving: bool) -> None:
    """Raise ConfigError for roles that no request could follow.

    `roles`: by device; `moving`: devices reach each other, so that KV can move.
    """
    found = set(roles.values())
    if found == {Role.BOTH}:
        return
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if found == {role}:
            raise ConfigError("devices", role.value, f"another device has to {other.value}")
    if not moving:
        allowed = "devices with roles reach each other: `--links` with `peers`"
        raise ConfigError("devices", "roles", allowed)


class Handover:
    """Observe first tokens of prefill devices, and hand their requests to decode devices."""

    def __init__(
        self,
        devices: Mapping[str, SimDevice],
        movers: Sequence[Movers],
        homes: Callable[[str], Sequence[str]],
        policy: FleetPolicy,
    ) -> None:
        """`homes`: returns the devices that serve a request's model; `policy` chooses among
        them."""
        self._devices, self._homes, self._policy = devices, homes, policy
        self._movers = {name: movers for movers in movers for name in movers.names}
        self._prefilling = [d for d in devices.values() if role_of(d) is Role.PREFILL]
        for each in movers if self._prefilling else ():
            each.any_time = True

    @property
    def busy(self) -> bool:
        """Whether requests may yet move to devices that decode."""
        return any(device.open_requests for device in self._prefilling)

    def on_output(self, name: str, output: Output) -> None:
        """Handle an output that a device has just produced."""
        device = self._devices[name]
        if role_of(device) is not Role.PREFILL or name not in self._movers:
            return
        if isinstance(output, TokenOutput) and output.index == 0:
            request = device.state.requests.get(output.request_id)
            target = None if request is None else self._target(name, request.submission)
            if request is not None and target is not None:
                now = device.clock.now()
                self._bring(now, name, target, request)
                self._look(now + PATIENCE, name, target, request, now)

    def _target(self, name: str, submission: Submission) -> str | None:
        """Return the device to which a request migrates; None if no other that decodes is
        reachable."""
        able = self._movers[name].names
        others = [d for d in self._homes(submission.model) if d != name and d in able]
        replicas = for_decode([replica_of(d, self._devices[d], submission) for d in others])
        return self._policy.decodes(replicas) if replicas else None

    def _bring(self, now: float, name: str, target: str, request: Request) -> None:
        device, model = self._devices[target], request.submission.model
        if not device.has_weights(model):
            base = device.state.named[model][0].spec.name
            why = f"its requests come from {name}"
            device.order(now + 2 * WAY, f"prefilled-{request.id}", Activate(base, why))

    def _look(self, until: float, name: str, target: str, request: Request, now: float) -> None:
        """Start the migration if possible; else check again, until weights can no longer come in
        time."""
        m = self._devices[target].state.named.get(request.submission.model)
        if request.state not in GOING or m is None:
            return
        ready = request.state is RequestState.RUNNING and request.computed >= m[0].spec.block_tokens
        movers = self._movers[name]
        if ready and self._devices[target].has_weights(request.submission.model):
            movers.move(now, request, name, target)
        elif now < until:
            look = partial(self._look, until, name, target, request)
            movers.agenda.schedule(now + POLL_SECONDS, look)
