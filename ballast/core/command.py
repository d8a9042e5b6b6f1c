"""Define operators' commands to a serving device (add, remove, ...), and their outcomes.

Sent by the server's admin service through the controller to a worker, as plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast.core.actions import ActivateCommand, Change, EvictCommand, Lend, Recall, ScrubKv
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Add:
    """Load a model beside those that are served, and serve it with its adapters."""

    settings: ModelSettings
    at_start: bool = False
    """Whether the model belongs to the fleet of a server that starts: it is loaded as fast as the
    machine can, not behind those that serve."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a model, with its adapters, from the device and from host memory.

    New requests are refused at once; open ones have `patience` seconds to end, then they fail.
    """

    model: str
    patience: float


ModelCommand = Add | Remove | Change | ActivateCommand | EvictCommand
"""Commands about a model."""
DeviceCommand = ModelCommand | Lend | Recall | ScrubKv
"""Commands to one device."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How a command ended."""

    code: str | None = None
    """None: it was done. Else `refused` (the device's state does not allow it), `invalid` (the
    command itself is wrong), `unavailable` (the device ends) or `broken` (an unexpected error)."""
    reason: str = ""
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    """The models that the device serves now, by name."""
    failed: dict[str, str] = field(default_factory=dict)
    """Adapters of an added model that cannot be served, with the reason."""
