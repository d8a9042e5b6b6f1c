"""Build the graph of links of simulated hosts: the wires that bytes cross between host and devices.

A host joins devices; a device has one wire to it, which the slices of the device share; one more
wire may bound the traffic of all devices of a host together. Devices reach each other over ports of
their own (NVLink), over their wires to the host (PCIe), or not at all. Used by `sim.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ballast.core.errors import ConfigError
from ballast.core.link import Direction, LinkRates
from ballast.core.model import ModelSpec
from ballast.sim.fluid import Fluid, Side, Wire
from ballast.sim.kv_tiers import virtual_store
from ballast.sim.link import Route
from ballast.sim.world import World


class PeerLinks(Enum):
    """How devices of a host reach each other."""

    NVLINK = "nvlink"
    """Through a port of each device, joined by a switch."""
    PCIE = "pcie"
    """Over their wires to the host, past its memory."""
    MEMORY = "memory"
    """Through host memory, which is their own memory: no bytes move between them."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLinks:
    """How the devices of a cluster are joined, in the order in which they are named."""

    per_host: int = 1
    """Devices on each host; the last host may have fewer."""
    host: LinkRates | None = None
    """Bandwidth that all devices of a host share to and from its memory; None: bounded only by
    their own links."""
    peers: PeerLinks = PeerLinks.NONE
    port: LinkRates | None = None
    """Bandwidth of each device's port to its peers, out of it (`to_host`) and into it
    (`to_device`)."""
    several: bool = False
    """Whether weights come over the links of all devices of a host at once, and from there over
    ports (Prism, 5.3)."""
    kv_host: int = 0
    """Bytes of each host's tier of KV below its devices; 0: there is none."""
    kv_disk: int = 0
    """Bytes of KV on each host's disk; 0: none is kept there."""
    network: float | None = None
    """Bytes per second at which a host receives from others, weights of models that it does not
    have and KV of requests that move there; None: weights at once, and no KV."""

    def __post_init__(self) -> None:
        if self.per_host < 1:
            raise ConfigError("per_host", self.per_host, "a host has one device or more")
        if (self.peers is PeerLinks.NVLINK) != (self.port is not None):
            raise ConfigError("peers", self.peers.value, "nvlink, and no other, needs `port`")
        if self.several and self.peers is not PeerLinks.NVLINK:
            raise ConfigError("several", "true", "links over ports: peers are nvlink")


APART = ClusterLinks()
"""Every device has a host of its own."""


class HostPlace:
    """A device on a host: its wire to the host's memory, and its port to its peers."""

    def __init__(self, host: SimHost, rates: LinkRates) -> None:
        self.host = host
        host.places.append(self)
        self._wire = Wire(rates)
        self._port = None if host.joints.port is None else Wire(host.joints.port)

    @property
    def route(self) -> Route:
        """The wires that bytes cross between the host's memory and the device."""
        path = {way: self._to_host(way) for way in Direction}
        return Route(self.host.fluid, path, self._loads())

    def _loads(self) -> Sequence[Sequence[Side]]:
        others = [other for other in self.host.places if other is not self]
        if not self.host.joints.several or not others:
            return ()
        down = Direction.TO_DEVICE
        over = ([*other._to_host(down), *other.to_peer(self)] for other in others)
        return [self._to_host(down), *over]

    def to_peer(self, other: HostPlace) -> Sequence[Side]:
        """Return the sides of wires that bytes cross from here to another device of the host.

        Raises ConfigError where the two cannot reach each other.
        """
        if self.host is not other.host or self is other:
            raise ConfigError("peers", "two places", "they are different devices of one host")
        if self._port is not None and other._port is not None:
            return [self._port.up, other._port.down]
        if self.host.joints.peers is PeerLinks.PCIE:
            return [self._wire.up, other._wire.down]
        raise ConfigError("peers", "none", "devices that do not reach each other")

    def over_network(self, other: HostPlace) -> Sequence[Side]:
        """Return the sides of wires that bytes cross from here to a device of another host: those
        of the network alone, the narrowest of the way. Raises ConfigError where there is none."""
        if self.host.net is None or other.host.net is None:
            raise ConfigError("network", "none", "hosts that reach each other")
        return [self.host.net.up, other.host.net.down]

    def _to_host(self, way: Direction) -> Sequence[Side]:
        own, shared = self._wire.side(way), self.host.wire
        return [own] if shared is None else [own, shared.side(way)]


class SimHost:
    """A host: its devices share links, in a world of their own, or in one with other hosts."""

    def __init__(self, joints: ClusterLinks, world: World | None = None) -> None:
        """`world`: of all hosts, whose `World.fluid` then is the network; None: its own."""
        self.joints, self.world = joints, World() if world is None else world
        self.fluid = self.world.fluid if world is None else Fluid(world.agenda)
        """All bytes that move between its devices, and between them and its memory."""
        self.places: list[HostPlace] = []
        rate = joints.network
        self.net = None if rate is None else Wire(LinkRates.even(rate, 2 * rate))
        """Wire to the other hosts, for KV."""
        self.wire = None if joints.host is None else Wire(joints.host)
        """Wire that bytes of all the host's devices cross; None: no common bound."""
        self.kv_store = virtual_store(joints.kv_host, joints.kv_disk)
        """The host's tier of KV."""
        self._models: dict[str, float] = {}
        """When the weights of each model are in its memory."""
        self._receives_until = 0.0

    def ready_at(self, now: float, spec: ModelSpec) -> float:
        """Have the weights of a model sent by another host unless they are here; returns when they
        are."""
        if spec.name not in self._models and self.joints.network is not None:
            seconds = sum(spec.segment_bytes) / self.joints.network
            self._receives_until = max(now, self._receives_until) + seconds
            self._models[spec.name] = self._receives_until
        return max(now, self._models.get(spec.name, now))

    def starts_with(self, specs: Iterable[ModelSpec]) -> list[ModelSpec]:
        """Note the models that a device serves from the start, and return them: their weights are
        here."""
        own = list(specs)
        self._models |= dict.fromkeys((spec.name for spec in own), 0.0)
        return own

    def place(self, rates: LinkRates) -> HostPlace:
        """Add a device whose own link carries `rates`."""
        return HostPlace(self, rates)


def places(
    joints: ClusterLinks, units: Sequence[tuple[LinkRates, int]], *, one_world: bool = False
) -> list[HostPlace]:
    """Return places of devices, on as many hosts as needed.

    `units`: by unit, the rates of its own link, and its number of devices: a group of several is on
    one host, alone there if it has more than a host has. `one_world`: whether devices of different
    hosts affect each other.
    """
    found: list[HostPlace] = []
    world = World() if one_world else None
    room = 0
    for rates, devices in units:
        host = found[-1].host if found and devices <= room else SimHost(joints, world)
        if not found or host is not found[-1].host:
            room = joints.per_host
        room -= devices
        found.append(host.place(rates))
    return found
