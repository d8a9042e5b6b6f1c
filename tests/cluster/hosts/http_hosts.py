"""Two hosts of a server for tests, with workers and HTTP relays, each with an address."""

from __future__ import annotations

from ballast.cluster.hosts.host_choice import HostInfo
from tests.cluster.hosts.agents import Agents
from tests.cluster.hosts.relay_hosts import RelayHosts

ADDRESSES = {"x": "127.0.0.1", "y": "127.0.0.2"}


class HttpHosts(Agents, RelayHosts):
    """A `HostProvider` whose relays end with the server's process."""

    def __init__(self) -> None:
        Agents.__init__(self, *ADDRESSES)
        RelayHosts.__init__(self, *ADDRESSES)

    async def hosts(self) -> dict[str, HostInfo]:
        return {node: HostInfo(f"host-{node}", 2.0, ip) for node, ip in ADDRESSES.items()}

    async def close(self) -> None:
        await Agents.close(self)
