"""Define the messages between the server and the process that speaks to Ray: lines of JSON.

Sent by `RayCluster`, answered by `ray_process`, one answer to each request, in any order.
"""

from __future__ import annotations

import msgspec

from ballast.cluster.hosts.host_choice import DeviceNeed, HostInfo


class RayMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A request, with a number that its answer has too."""

    id: int


class HostsMsg(RayMessage, frozen=True):
    """List the hosts of the cluster."""


class KeptMsg(RayMessage, frozen=True):
    """List what a server of this fleet has left: agents, and devices with resources."""


class EndFleetMsg(RayMessage, frozen=True):
    """End all agents of this fleet, and free what was reserved for its devices."""


class ReserveHostMsg(RayMessage, frozen=True):
    """Reserve a device's resources on a host, in place of any that it had; wait until there are
    some."""

    device: str
    need: DeviceNeed
    avoid: tuple[str, ...]
    doubtful: tuple[str, ...]


class ReleaseHostMsg(RayMessage, frozen=True):
    """Free a device's resources, or have it wait for none any more."""

    device: str


class OpenHostMsg(RayMessage, frozen=True):
    """Start an agent on a host, unless one is there; `anew`: in place of that one."""

    node: str
    worker_command: tuple[str, ...]
    anew: bool


class ConnectHostMsg(RayMessage, frozen=True):
    """Connect a host's agent with the server."""

    node: str
    address: str
    key: str
    """The server's public key."""


class OpenRelayMsg(RayMessage, frozen=True):
    """Start an HTTP relay on a host, unless one is there; `anew`: in place of that one."""

    node: str
    ip: str
    port: int
    """Address to listen at."""
    anew: bool


class ConnectRelayMsg(RayMessage, frozen=True):
    """Have a host's HTTP relay connect to the server."""

    node: str
    address: str
    key: str
    """The server's public key."""


class RayAnswer(msgspec.Struct, frozen=True):
    """The answer to a request."""

    id: int
    error: str = ""
    """Why it was not done; empty: it was."""
    node: str = ""
    """Host that has a device's resources."""
    key: str = ""
    """Public key of an agent or relay."""
    ip: str = ""
    """Address of the server's host in the cluster's network."""
    hosts: dict[str, HostInfo] = {}
    """By node."""
    nodes: tuple[str, ...] = ()
    """Hosts with agents."""
    reserved: dict[str, str] = {}
    """Host of each device that has resources."""
    addresses: tuple[str, ...] = ()
    """Of the hosts; in the first answer, with which the process begins."""


RayRequest = (
    HostsMsg
    | KeptMsg
    | EndFleetMsg
    | ReserveHostMsg
    | ReleaseHostMsg
    | OpenHostMsg
    | ConnectHostMsg
    | OpenRelayMsg
    | ConnectRelayMsg
)
