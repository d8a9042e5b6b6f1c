"""What a policy for several devices sees, and what it may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.core.cost import Traffic


@dataclass(frozen=True, slots=True)
class Need:
    """What a model asks of a device that serves it."""

    model: str
    least: int
    """Bytes without which a device cannot serve it at all: weights, activations, one request."""
    weights: int
    """Bytes."""
    work: Mapping[str, float] = field(default_factory=dict)
    """By kind of device, expected seconds of its compute per second; none where nothing is known.
    """
    pinned: bool = False
    """Its weights make way for nobody."""
    peak: Mapping[str, float] = field(default_factory=dict)
    """`work` while it is asked most; none where nothing is known but the mean."""
    kv_bytes_per_token: int = 0
    tpot: float = float("inf")
    """Service level: seconds per output token."""

    @property
    def busiest(self) -> Mapping[str, float]:
        """What its devices have to keep up with: the peak, where that is known."""
        return self.peak or self.work


@dataclass(frozen=True, slots=True)
class Room:
    """A device that may serve models."""

    device: str
    bytes: int
    kind: str = ""
    """Devices of one kind are equally fast."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """A model on a device, since the view before."""

    model: str
    work: float
    """Seconds of the device's compute that its jobs took, per second."""
    open_requests: int
    late: int
    """Of these, waiting ones that have used up half of the time in which their first token is due,
    and running ones whose tokens come more slowly than they should."""
    weights: int = 0
    """Bytes of its weights that are there now."""
    homed: bool = True
    """Whether it gets new requests there by the policy's word: not where it is about to leave, and
    not where operators have the say."""
    traffic: Traffic = field(default_factory=Traffic)
    """Of the requests that the device got for it lately."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """A device, and the models that it serves."""

    room: Room
    hosting: tuple[Hosting, ...]

    @property
    def name(self) -> str:
        return self.room.device

    @property
    def work(self) -> float:
        """Of all its models."""
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
class FleetView:
    """All devices of a server, as they were at `now`, and what the models need."""

    now: float
    devices: tuple[DeviceLoad, ...]
    needs: tuple[Need, ...]
    """In the fleet's order."""


@dataclass(frozen=True, slots=True)
class Place:
    """Serve a model on one more device."""

    model: str
    device: str
    why: str = ""
    activate: bool = False
    """Bring its weights there at once, before it is asked."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """No new requests for a model on a device; when those open have ended it leaves it."""

    model: str
    device: str
    why: str = ""


FleetAction = Place | Withdraw


@dataclass(frozen=True, slots=True)
class FleetDecision:
    """A fleet policy's answer: what to do, what to remember, when to ask again (None: never)."""

    actions: tuple[FleetAction, ...] = ()
    memo: object = None
    wake_at: float | None = None
