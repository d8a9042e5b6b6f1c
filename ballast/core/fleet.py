"""Define the view and the decision of a fleet policy: models over devices, pages between them.

Built by `control.fleet_view` from the devices' reports and the controller's book of leases; fleet
policies (`policy.fleet`) only read it and return actions, which are orders (`core.fleet_orders`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ballast.core.cost import Traffic
from ballast.core.fleet_orders import LendPages as LendPages
from ballast.core.fleet_orders import Migrate as Migrate
from ballast.core.fleet_orders import Place as Place
from ballast.core.fleet_orders import RecallPages as RecallPages
from ballast.core.fleet_orders import Withdraw as Withdraw
from ballast.core.price_curve import PriceCurve


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Memory and compute that a model needs of a device that serves it."""

    model: str
    least: int
    """Minimum bytes to serve the model: weights, activations, KV of one request."""
    weights: int
    """Bytes of its weights, and of KV that is guaranteed to it."""
    work: Mapping[str, float] = field(default_factory=dict)
    """Expected compute seconds per second, by kind of device; empty: unknown."""
    pinned: bool = False
    """Whether its weights are never evicted."""
    peak: Mapping[str, float] = field(default_factory=dict)
    """`work` at the peak of its traffic; empty: only the mean is known."""
    kv_bytes_per_token: int = 0
    block_tokens: int = 1
    """Tokens of a block of its KV."""
    tpot: float = float("inf")
    """Service level: seconds per output token."""

    @property
    def busiest(self) -> Mapping[str, float]:
        """Compute that its devices must provide: the peak if known, else the mean."""
        return self.peak or self.work


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """A device that may serve models, with its `bytes` of budget."""

    device: str
    bytes: int
    kind: str = ""
    """Kind of device; devices of one kind are equally fast."""
    host: str = ""
    """Name of its host, in whose memory its models' weights are: for all devices there."""


_NO_TRAFFIC = Traffic()


class ModelLoad(NamedTuple):
    """Load of a model on a device since the previous view."""

    model: str
    work: float
    """Compute seconds of its jobs, per second."""
    open_requests: int
    late: int
    """Open requests that are late: waiting for more than half of their TTFT target, or running with
    tokens slower than their TPOT target."""
    weights: int = 0
    """Bytes of its weights on the device now."""
    homed: bool = True
    """Whether the policy has placed it there: False if it is leaving, or if operators have named
    its devices."""
    traffic: Traffic = _NO_TRAFFIC
    """Recent traffic of its requests on the device."""
    kv_pages: int = 0
    """Pages of the device that back its KV, cached prefixes included."""
    cached_pages: int = 0
    """Part of `kv_pages` that dropping cached prefixes would free."""
    borrowed_pages: int = 0
    """Pages of other devices that back its KV."""
    waiting: int = 0
    """Requests that wait."""
    missed_blocks: int = 0
    """Blocks of cached prefixes that were forgotten to make room, and computed again since the
    previous view."""
    lacking: int = 0
    """Part of `waiting` that pages would let run: without requests beyond `max_running`."""
    lacking_tokens: int = 0
    """Tokens of these, whose KV they lack."""
    leaving: bool = False
    """Whether the policy has withdrawn it: its weights will not come back."""
    longest_tokens: int = 0
    """Tokens of the longest request of the last minute or two."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """Load of a device: the models that it serves."""

    room: DeviceCapacity
    hosting: tuple[ModelLoad, ...]
    page_bytes: int = 1
    total: int = 0
    """Pages of its pool."""
    free: int = 0
    """Pages that nobody has, or that are about to be free."""
    link_load: float = 0.0
    """Part of the time since the previous view in which its link to the host carried layers."""
    prices: PriceCurve | None = None
    """Marginal prices of its pages; None: its memory policy has none."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(h.waiting for h in self.hosting)

    @property
    def name(self) -> str:
        return self.room.device

    @property
    def work(self) -> float:
        """Compute seconds per second of all its models."""
        return sum(h.work for h in self.hosting)

    @property
    def open_requests(self) -> int:
        return sum(h.open_requests for h in self.hosting)

    @property
    def late(self) -> int:
        return sum(h.late for h in self.hosting)

    def serves(self, model: str) -> bool:
        return any(h.model == model and h.homed for h in self.hosting)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """Pages that one device lends to another."""

    lender: str
    borrower: str
    pages: int
    recalled: int
    """Part of `pages` that is to be returned."""
    why: str = ""
    """Reason of the last order to lend."""
    by_operator: bool = False
    """Whether an operator has ordered what is lent, so that no fleet policy changes it."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """All devices of a server as of `now`, and the needs of the models."""

    now: float
    devices: tuple[DeviceLoad, ...]
    needs: tuple[ModelDemand, ...]
    """Needs of the models, in the fleet's order."""
    leases: tuple[LeaseView, ...] = ()
    """All that is lent, by lender and borrower."""
    pairs: tuple[tuple[str, str], ...] = ()
    """(lender, borrower) of all devices that can lend to each other now, without those between
    which an operator has lent or recalled, and not released them since."""
    network: float = inf
    """Bytes per second at which a host receives weights that it does not have, and KV."""

    def seconds_to_host(self, need: ModelDemand, device: DeviceLoad) -> float:
        """Return how long a model's weights take to the host of `device`; 0 where they are there,
        as one of its devices serves the model."""
        there = (d for d in self.devices if d.room.host == device.room.host)
        if self.network == inf or any(d.serves(need.model) for d in there):
            return 0.0
        return need.weights / self.network

    def seconds_between(self, source: DeviceLoad, target: DeviceLoad, n_bytes: int) -> float:
        """Return how long KV takes from a device to another; 0 on one host."""
        return 0.0 if source.room.host == target.room.host else n_bytes / self.network


PlacementAction = Place | Withdraw
LendingAction = LendPages | RecallPages
FleetAction = PlacementAction | Migrate | LendingAction


@dataclass(frozen=True, slots=True)
class FleetDecision:
    """A fleet policy's result: actions, its memo, and when to call it again (None: never)."""

    actions: tuple[FleetAction, ...] = ()
    memo: object = None
    wake_at: float | None = None
