"""Ways to divide models among devices, by name."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.errors import ConfigError
from ballast.policy.base import FleetPolicy
from ballast.policy.follow import Follow


@dataclass(frozen=True, slots=True)
class Placement:
    """How models are placed at the start, and whether they are moved later."""

    name: str
    expects: bool
    """Whether the start takes account of the work that each model is expected to bring."""
    policy: FleetPolicy | None
    """None: models stay where they are."""


_KNOWN = {
    p.name: p
    for p in (
        Placement("weights", False, None),
        Placement("work", True, None),
        Placement("follow", False, Follow()),
        Placement("both", True, Follow()),
    )
}
PLACEMENTS = tuple(_KNOWN)


def placement_of(name: str) -> Placement:
    """Raises ConfigError, which lists the known names."""
    if name not in _KNOWN:
        raise ConfigError("placement", name, f"use one of {', '.join(PLACEMENTS)}")
    return _KNOWN[name]
