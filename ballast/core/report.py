"""What a device tells the controller about itself, for routing, metrics and display."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """One model on one device."""

    name: str
    residency: str
    """A value of `ballast.core.view.Residency`."""
    weight_pages: int
    """Pages its weights take now, those that it shares with other models included."""
    kv_pages: int
    """Of the device itself."""
    cached_pages: int
    waiting: int
    running: int
    late: int
    """Of those waiting, they that have used up half of the time in which their first token is due;
    of those running, they whose tokens come more slowly than they should."""
    lane_seconds: float
    """That its jobs have taken, since start; likewise what follows."""
    activations: int
    evictions: int
    preemptions: int
    prompt_tokens: int
    """Of all finished requests."""
    cached_tokens: int
    output_tokens: int
    borrowed_pages: int = 0
    """Pages of other devices that back its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device at one moment."""

    device: str
    now: float
    """Seconds on the device's clock."""
    page_bytes: int
    """Of all ranks together, where the device has several."""
    total: int
    """Pages of the pool."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    """Pages by owner, `weights:NAME`, `kv:NAME`, `shared:DIGEST` (weights of several models),
    `arena:LANE`, `lent:DEVICE`; in all total - free - reclaiming."""
    models: tuple[ModelReport, ...]
    jobs: int
    """Jobs run since start."""
    draining: bool
    borrowed: dict[str, int] = field(default_factory=dict)
    """Pages of other devices that it may use, by device; of no account above."""
