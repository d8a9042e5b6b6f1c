"""Choose the host of a device, and how many of its cores it gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ballast.core.settings import DeviceSettings, FleetSettings


class DeviceNeed(msgspec.Struct, frozen=True):
    """What a device needs of a host."""

    cpus: int
    memory: int
    """Bytes."""


class HostInfo(msgspec.Struct, frozen=True):
    """A host of a cluster."""

    name: str
    """As operators know it; different from those of the other hosts."""
    cpus: float
    ip: str
    """Its address in the cluster's network."""


class HostRoom(msgspec.Struct, frozen=True):
    """What a host has left."""

    node: str
    cpus: float
    memory: float
    devices: int = 0
    """Devices that it has already."""


def choose_host(
    need: DeviceNeed,
    rooms: Sequence[HostRoom],
    avoid: Collection[str],
    doubtful: Collection[str] = (),
) -> str | None:
    """Return the host with the fewest devices, then the most cores left, of those that have room;
    None: none has. `avoid`: hosts that are drained; `doubtful`: those that were lost, which come
    last: their agent may have ended alone, or the host with it."""
    able = [
        room
        for room in rooms
        if room.node not in avoid and room.cpus >= need.cpus and room.memory >= need.memory
    ]
    best = min(able, key=lambda room: _rank(room, doubtful), default=None)
    return None if best is None else best.node


def _rank(room: HostRoom, doubtful: Collection[str]) -> tuple[bool, int, float, str]:
    return room.node in doubtful, room.devices, -room.cpus, room.node


def needs_of(fleet: FleetSettings, hosts: Mapping[str, float]) -> dict[str, DeviceNeed]:
    """Return what each device of a fleet needs. `hosts`: cores by host.

    A device without `threads` gets an equal share of its host's cores, as if devices were spread
    evenly over the hosts.
    """
    devices = [device for device, _ in fleet.devices.values()]
    each = -(-len(devices) // max(1, len(hosts)))
    share = max(1, int(min(hosts.values(), default=1) // each))
    return {d.name: DeviceNeed(d.threads or share, host_bytes(d)) for d in devices}


def host_bytes(device: DeviceSettings) -> int:
    """Return the bytes of host memory that a device reserves."""
    return device.budget_bytes if device.gpu is None else 0
