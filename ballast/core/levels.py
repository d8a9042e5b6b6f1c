"""Define the levels of a model or adapter: service level and bounds, which may change while it
serves.

One record: settings, specs and the order that changes levels inherit its fields, so that a level
stands here, and in the fleet file's schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level of a model, in seconds."""

    ttft: float = 2.0
    """Time to first token, from arrival."""
    tpot: float = 0.2
    """Mean time per output token after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Service level and bounds of a model or adapter."""

    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    """Higher is more important."""
    max_waiting: int = 10_000
    """Bound of the queued requests; more are refused."""
    queue_seconds: float | None = None
    """Time after which a request that was not admitted fails; None: never, and of an adapter: that
    of its base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLevels(Levels):
    """Levels of a model, of which adapters take the further ones from their base."""

    share: float = 1.0
    """Weight of this model where memory is divided by fixed shares (preset `static`)."""
    max_running: int = 64
    """Bound of the requests in one batch."""
    pinned: bool = False
    """A pinned model is never evicted."""
    ttl: float | None = None
    """Idle time to live: seconds without a request after which it is evicted; None, 0: never, until
    others need its memory."""
    guarantee: int = 0
    """Bytes of each of its devices that weights and KV of the model can always have. They include
    its weights, so it is pinned; others never get what it leaves unused."""
    limit: int | None = None
    """Most bytes of each of its devices that its weights and KV take together; None: no bound."""

    def __post_init__(self) -> None:
        if self.guarantee:
            object.__setattr__(self, "pinned", True)


T = TypeVar("T", bound=Levels)


def level_fields(source: Levels, kind: type[Levels] = ModelLevels) -> dict[str, Any]:
    """Return the levels of a record by field, those that both it and `kind` have."""
    common = kind if isinstance(source, kind) else Levels
    return {f.name: getattr(source, f.name) for f in fields(common)}


def at_levels(target: T, source: Levels) -> T:
    """Return `target` with the levels of `source`, as far as it has them."""
    kind = ModelLevels if isinstance(target, ModelLevels) else Levels
    return replace(target, **level_fields(source, kind))
