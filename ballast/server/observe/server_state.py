"""Define the records of `/admin/state`: the server's state at one moment, for `ballast top` and
scripts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ballast.cluster.kept_kv import KvReport
from ballast.core.capability import Capability
from ballast.core.fleet import LeaseView
from ballast.core.report import ModelReport
from ballast.core.settings import Slo
from ballast.server.model_loads import LoadStatus
from ballast.server.observe.latency import Quantiles

Status = Literal["ok", "starting", "draining", "restarting", "lost"]


class NameNow(msgspec.Struct, frozen=True):
    """A model or an adapter, as clients ask for it."""

    name: str
    slo: Slo | None
    tokens: int
    """Tokens generated since the server started."""
    ttft: Quantiles | None
    """TTFT over the last minute, as `tpot` below; None without requests."""
    tpot: Quantiles | None


class ModelNow(msgspec.Struct, frozen=True):
    """One model of the fleet."""

    status: Literal["loaded", "loading", "evicted", "failed"]
    report: ModelReport
    names: list[NameNow]
    """Names that clients use: the model's own, then its adapters'."""
    pinned: bool
    devices: list[str] = []
    """Devices that serve the model."""
    guarantee: int = 0
    """Bytes of each of these that it can always have; 0: none."""
    limit: int | None = None
    """Most bytes of each of these that it may have."""


class DeviceNow(msgspec.Struct, frozen=True):
    """One device, as its worker last reported it."""

    device: str
    status: Literal["ok", "standby", "restarting", "lost"]
    reason: str | None
    """Reason why no worker serves the device, if none does."""
    restarts: int
    open: int
    """Requests routed to the device that have not ended."""
    page_bytes: int
    total: int
    """Pages, as are the counts up to `owners`."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    jobs: int
    models: list[ModelReport]
    failed: dict[str, str]
    """Models that the device should serve and does not, with the reason."""
    borrowed: dict[str, int] = {}
    """Pages borrowed from other devices, by device."""
    moved_in: int = 0
    """Requests that have migrated from other devices with their KV."""
    fetched_tokens: dict[str, int] = {}
    """Prompt tokens whose KV came from tiers below the device, by tier."""
    cordoned: bool = False
    """Whether an operator has drained the device: it gets no requests."""
    host: str = ""
    """Name of its host, where devices are on many hosts."""
    cached_pages: int = 0
    """Pages that only cached prefixes hold."""


class ServerNow(msgspec.Struct, frozen=True):
    """A server at one moment. Pages and models are as the workers last reported them: of all
    devices together, in the smallest pages that one of them has; `devices` tells them apart."""

    version: str
    time: float
    """Seconds since 1970."""
    uptime: float
    """Seconds since the server started."""
    preset: str
    status: Status
    """Status as `/health` reports it."""
    reason: str | None
    """Reason why no worker serves, if none does."""
    restarts: int
    """Workers started in place of one that died."""
    open: int
    """Open requests of models, including those that wait for a worker."""
    device: str
    """Names of the devices."""
    page_bytes: int
    total: int
    """Pages, as are the counts up to `owners`."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    """Pages by owner, as in `DeviceReport`."""
    jobs: int
    models: list[ModelNow]
    failed: dict[str, str]
    """Models of the fleet that are not served, with the reason."""
    decisions: list[dict[str, Any]]
    """Last decisions, oldest first: `time` (since 1970), `action`, `model`, and mostly `why`;
    `refused`, if it was not carried out; `by`, where the preset did not decide; `device`, where
    there are several."""
    devices: list[DeviceNow]
    loading: list[LoadStatus] = []
    """Models that have not been loaded yet, in the order in which they will be."""
    lending: list[Capability] = []
    """Whether and how one device can lend pages to another, for each pair of devices."""
    leases: list[LeaseView] = []
    """Pages that are lent now, by lender and borrower, with the reason."""
    kv: KvReport | None = None
    """KV in tiers below the devices; None: there are none."""
