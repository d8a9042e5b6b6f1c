"""What an operator may order of a device while it serves, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast.core.actions import Activate, Change, Evict, Lend, Recall
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Add:
    """Load a model, beside those that serve, and serve it with its adapters."""

    settings: ModelSettings


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a model from the device and from host memory, with its adapters.

    New requests are refused at once; those open have `patience` seconds to end, then they fail.
    """

    model: str
    patience: float


ModelCommand = Add | Remove | Change | Activate | Evict
"""About a model."""
DeviceCommand = ModelCommand | Lend | Recall
"""What one device may be ordered."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How an order ended."""

    code: str | None = None
    """None: it was done. Else `refused` (the state of things does not allow it), `invalid` (what
    was ordered cannot be), or `unavailable` (the device ends)."""
    reason: str = ""
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    """What the device serves now, by name."""
    failed: dict[str, str] = field(default_factory=dict)
    """Adapters of an added model that cannot be served, with the reason."""
