"""Define the records of `/admin/state`: the server's state at one moment, for `ballast top` and
scripts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ballast.core.capability import Capability
from ballast.core.report import ModelReport
from ballast.core.settings import Slo
from ballast.server.observe.latency import Quantiles

Status = Literal["ok", "draining", "restarting", "lost"]


class NameNow(msgspec.Struct, frozen=True):
    """A model or an adapter, as clients ask for it."""

    name: str
    slo: Slo | None
    tokens: int
    """Generated since the server started."""
    ttft: Quantiles | None
    """Of the last minute, like `tpot`; None where there were none."""
    tpot: Quantiles | None


class ModelNow(msgspec.Struct, frozen=True):
    """One model of the fleet."""

    status: Literal["loaded", "loading", "evicted", "failed"]
    report: ModelReport
    names: list[NameNow]
    """The model's own, then its adapters'."""
    pinned: bool
    devices: list[str] = []
    """Those that serve it."""


class DeviceNow(msgspec.Struct, frozen=True):
    """One device, as its worker last reported it."""

    device: str
    status: Literal["ok", "restarting", "lost"]
    reason: str | None
    """Why no worker serves it, if none does."""
    restarts: int
    open: int
    """Requests that were given to it and have not ended."""
    page_bytes: int
    total: int
    """Pages; likewise below."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    jobs: int
    models: list[ModelReport]
    failed: dict[str, str]
    """Models that it should serve and does not, with the reason."""
    borrowed: dict[str, int] = {}
    """Pages of other devices that it may use, by device."""
    moved_in: int = 0
    """Requests that have come from other devices with their KV."""
    cordoned: bool = False
    """An operator has drained it: it takes no requests."""


class ServerNow(msgspec.Struct, frozen=True):
    """A server at one moment. Pages and models are as the workers last reported them: of all
    devices together, in the smallest pages that one of them has; `devices` tells them apart."""

    version: str
    time: float
    """Seconds since 1970."""
    uptime: float
    """Seconds."""
    preset: str
    status: Status
    """As `/health` says it."""
    reason: str | None
    """Why no worker serves, if none does."""
    restarts: int
    """Workers that were started in place of one that died."""
    open: int
    """Requests of models that have not ended, those included that wait for a worker."""
    device: str
    """Their names."""
    page_bytes: int
    total: int
    """Pages; likewise below."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    """As in `DeviceReport`."""
    jobs: int
    models: list[ModelNow]
    failed: dict[str, str]
    """Models of the fleet that are not served, with the reason."""
    decisions: list[dict[str, Any]]
    """The last, oldest first: `time` (since 1970), `action`, `model`, and mostly `why`; `refused`,
    if it was not done; `by` whom, where it was not the preset; `device`, of several."""
    devices: list[DeviceNow]
    lending: list[Capability] = []
    """Which devices can lend pages to which."""
