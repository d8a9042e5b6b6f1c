"""Roles of simulated devices: prefill, decode or both; and devices as replicas for a request."""

from __future__ import annotations

from collections.abc import Mapping

from ballast.core.errors import ConfigError
from ballast.core.request import Submission
from ballast.core.settings import Role
from ballast.policy.fleet.replica_choice import Replica
from ballast.sim.device import SimDevice


def role_of(device: SimDevice) -> Role:
    """The part of a request that the device computes: prefill, decode or both."""
    return device.state.settings.role


def replica_of(name: str, device: SimDevice, submission: Submission) -> Replica:
    """Describe a device as a replica for a request, as of the device's clock."""
    held, resident = device.held_tokens(submission), device.has_weights(submission.model)
    prompt, link = len(submission.prompt), device.link_use(submission)
    return Replica(name, device.open_requests, held, resident, role_of(device), prompt, link)


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
