"""Read the files that describe a simulated cluster: placement, links, and operators' orders.

Used by `sim.cluster` and `ballast simulate`. A fault in a file raises `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, FleetDecision, FleetView, ModelDemand
from ballast.core.link import LinkRates
from ballast.core.settings import FleetSettings
from ballast.core.units import format_bytes
from ballast.fleet.faults import unknown
from ballast.fleet.field_types import Bandwidth, Count, DeviceName, Name, Positive, Size
from ballast.fleet.schema import Keys
from ballast.policy.base import FleetPolicy
from ballast.sim.toml_file import NotNegative, Whole, read_keys
from ballast.sim.topology import APART, ClusterLinks, PeerLinks

Number = int | str
"""A device: its number, counted from 0, or its name."""


class _Rates(Keys):
    """Bytes per second of a link, by direction, alone and while the other direction carries."""

    to_device: Bandwidth
    to_host: Bandwidth
    to_device_mixed: Bandwidth | None = None
    """None: as alone."""
    to_host_mixed: Bandwidth | None = None

    @property
    def rates(self) -> LinkRates:
        return LinkRates(
            self.to_device,
            self.to_host,
            self.to_device_mixed or self.to_device,
            self.to_host_mixed or self.to_host,
        )


class _Links(Keys):
    """A file of `--links`: how the devices of a cluster are joined, as in `ClusterLinks`."""

    per_host: Count = 1
    host: _Rates | None = None
    peers: Literal["nvlink", "pcie", "memory", "none"] = "none"
    port: _Rates | None = None
    several: bool = False


class _Homes(Keys):
    """A file of `--placement`."""

    homes: dict[Name, list[Whole | DeviceName]] = Field(min_length=1)


Device = Whole | DeviceName


class OperatorOrder(Keys):
    """An operator's order, at a time: exactly one of `ORDERS`.

    `lend` and `recall` are about two devices; all others name the device in their value, and those
    about a model the `model`.
    """

    at: NotNegative
    """Virtual seconds."""
    lender: Device | None = None
    borrower: Device | None = None
    lend: Size | None = None
    """Bytes, of which whole pages are lent."""
    recall: Size | Literal["all"] | None = None
    """Bytes."""
    seconds: Positive = 60.0
    """Seconds within which recalled pages are to be returned, or requests of a model that is
    withdrawn are to end."""
    drain: Device | None = None
    uncordon: Device | None = None
    model: Name | None = None
    place: Device | None = None
    withdraw: Device | None = None
    migrate: Device | None = None
    to: Device | None = None
    """Where requests migrate; None: to any device of the model."""
    activate: Device | None = None
    evict: Device | None = None

    @property
    def what(self) -> str:
        """The one of `ORDERS` that it is. Raises ConfigError unless it is exactly one, complete."""
        where, given = f"orders: at {self.at:g} s", self.model_fields_set
        found = [key for key in ORDERS if key in given]
        if len(found) != 1:
            raise ConfigError(where, found, f"one of {', '.join(ORDERS)}")
        needed = {"lend": {"lender", "borrower"}, "recall": {"lender", "borrower"}}
        of_model = set() if found[0] in ("drain", "uncordon") else {"model"}
        missing = needed.get(found[0], of_model) - given
        if missing:
            raise ConfigError(where, found[0], f"with {' and '.join(sorted(missing))}")
        return found[0]

    @property
    def lends(self) -> bool:
        """Whether it is about pages."""
        return self.lend is not None or self.recall is not None


ORDERS = (
    "lend",
    "recall",
    "drain",
    "uncordon",
    "place",
    "withdraw",
    "migrate",
    "activate",
    "evict",
)


class _Orders(Keys):
    """A file of `--orders`."""

    orders: list[OperatorOrder] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class GivenHomes(FleetPolicy):
    """Fleet policy that places models on the devices that a file names, and never moves them."""

    file: str
    homes: Mapping[str, Sequence[Number]]

    @property
    def replicates(self) -> bool:
        return any(len(devices) > 1 for devices in self.homes.values())

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        """Return, by model, the names of its devices, each once.

        Raises ConfigError for a model that is missing or unknown, an unknown device, or a device
        that cannot serve the model.
        """
        where = f"{self.file}: homes"
        models, names = [need.model for need in needs], [room.device for room in rooms]
        for model in self.homes:
            if model not in models:
                raise ConfigError(where, model, unknown(model, models))
        found = {}
        for need in needs:
            chosen = self.homes.get(need.model)
            if not chosen:
                allowed = "one device or more for each model of the fleet"
                raise ConfigError(where, need.model, allowed)
            devices = [device_named(where, at, names) for at in chosen]
            found[need.model] = list(dict.fromkeys(devices))
            for room in rooms:
                if room.device in devices and need.least > room.bytes:
                    missing = format_bytes(need.least - room.bytes)
                    allowed = f"{room.device} is too small for it: {missing} are missing"
                    raise ConfigError(where, need.model, allowed)
        return found

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFiles:
    """Contents of all files."""

    joints: ClusterLinks = APART
    homes: FleetPolicy | None = None
    """Fleet policy that replaces the preset's; None: the preset's."""
    orders: tuple[OperatorOrder, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether operators have models or requests move."""
        return not all(order.lends for order in self.orders)

    def of(self, fleet: FleetSettings) -> ClusterFiles:
        """Return these, with the KV tiers and the hosts of a fleet; a file of links says itself how
        many devices a host has."""
        joints = replace(self.joints, kv_host=fleet.kv.host_bytes, kv_disk=fleet.kv.disk_bytes)
        if (hosts := fleet.hosts) is not None:
            joints = replace(joints, network=hosts.network)
            if self.joints is APART:
                joints = replace(joints, per_host=hosts.devices)
        return replace(self, joints=joints)


NO_FILES = ClusterFiles()


def read_cluster_files(
    links: Path | None, placement: str | None, orders: Path | None
) -> ClusterFiles:
    """Read the files; a `placement` that is no TOML file names a fleet policy.

    Raises ConfigError for a file that cannot be read or has a fault.
    """
    homes: GivenHomes | None = None
    if placement is not None and placement.endswith(".toml"):
        homes = GivenHomes(placement, read_keys(Path(placement), _Homes).homes)
    read = () if orders is None else tuple(read_keys(orders, _Orders).orders)
    for order in read:
        order.what  # noqa: B018, raises
    joints = APART if links is None else _joints(read_keys(links, _Links))
    return ClusterFiles(joints=joints, homes=homes, orders=read)


def device_named(where: str, at: Number, names: Sequence[str]) -> str:
    """Return the name of a device. Raises ConfigError, with `where` it was named, if unknown."""
    if isinstance(at, str):
        if at not in names:
            raise ConfigError(where, at, unknown(at, names))
        return at
    if at >= len(names):
        raise ConfigError(where, at, f"devices are numbered from 0 to {len(names) - 1}")
    return names[at]


def _joints(links: _Links) -> ClusterLinks:
    return ClusterLinks(
        per_host=links.per_host,
        host=None if links.host is None else links.host.rates,
        peers=PeerLinks(links.peers),
        port=None if links.port is None else links.port.rates,
        several=links.several,
    )
