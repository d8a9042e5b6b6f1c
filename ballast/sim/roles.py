"""Roles of simulated devices: prefill, decode or both; and devices as replicas for a request."""

from __future__ import annotations

from collections.abc import Mapping

from ballast.core.errors import ConfigError
from ballast.core.request import Request, Submission
from ballast.core.settings import Role
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.policy.fleet.replica_choice import LinkUse, Replica
from ballast.sim.device import SimDevice


def role_of(device: SimDevice) -> Role:
    """The part of a request that the device computes: prefill, decode or both."""
    return device.state.settings.role


def replica_of(name: str, device: SimDevice, submission: Submission) -> Replica:
    """Describe a device as a replica for a request, as of the device's clock."""
    m, adapter = device.state.named[submission.model]
    salt = Request.salt_of(submission, m.spec, adapter)
    held = m.kv.prefixes.held_tokens(submission.prompt, salt)
    resident, prompt = m.residency is Residency.RESIDENT, len(submission.prompt)
    link = link_use(device, m, prompt) if device.state.weights_in_place else None
    return Replica(name, device.open_requests, held, resident, role_of(device), prompt, link)


def link_use(device: SimDevice, m: ModelState, prompt: int) -> LinkUse:
    """Return what a model, and those with open requests, read in place over the host's link, as of
    the device's clock."""
    open_here = {device.state.named[name][0].spec.name for name in device.open_models()}
    return LinkUse(
        host=id(device.world),
        capacity=device.link.bytes_per_second,
        model=m.spec.name,
        demand=device.in_place[m.spec.name].demand,
        active={name: device.in_place[name].demand for name in sorted(open_here)},
        prefill_seconds=m.costs.prefill_seconds(prompt),
        ttft=m.spec.slo.ttft,
    )


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
