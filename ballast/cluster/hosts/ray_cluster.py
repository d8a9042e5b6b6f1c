"""Reach the hosts of a Ray cluster, through a process that speaks to Ray (`ray_process`).

Used by `HostedWorkers`, on the event loop of the server, which does not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import itertools
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from ballast.cluster.hosts.host_choice import DeviceNeed, HostInfo
from ballast.cluster.hosts.ray_messages import (
    ConnectHostMsg,
    ConnectRelayMsg,
    EndFleetMsg,
    HostsMsg,
    KeptMsg,
    OpenHostMsg,
    OpenRelayMsg,
    RayAnswer,
    RayRequest,
    ReleaseHostMsg,
    ReserveHostMsg,
)
from ballast.core.errors import ConfigError, Unavailable
from ballast.isolation.environment import child_environment

START_SECONDS = 60.0
"""Time for the process to import Ray and to connect to the cluster."""
END_SECONDS = 10.0
"""Time for Ray to end the agents, and to free what was reserved."""
_LONGEST_LINE = 1 << 20


def objection(addresses: Iterable[str], environment: Mapping[str, str]) -> str | None:
    """Return why a cluster whose nodes have these addresses must not be used; None: it may.

    Whoever reaches Ray runs code on its nodes. On loopback alone no stranger does. Elsewhere
    it needs Ray's tokens or TLS; addresses of the public Internet need TLS.
    """
    tls = environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    token = environment.get("RAY_AUTH_MODE", "").lower() == "token"
    for address in addresses:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return f"{address!r} is no address"
        if ip.is_loopback or tls:
            continue
        if ip.is_global:
            return f"node {address} has a public address: use a private network, or RAY_USE_TLS=1"
        if not token:
            return (
                f"node {address} is reached over a network, and whoever reaches Ray there runs "
                "code on it: set RAY_AUTH_MODE=token on every node, or RAY_USE_TLS=1"
            )
    return None


class RayCluster:
    """A `HostProvider`: hosts are the nodes of a Ray cluster."""

    def __init__(self, address: str, fleet: str = "fleet") -> None:
        """`fleet`: as of `RayHosts`."""
        self._address, self._fleet = address, fleet
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[RayAnswer]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = False
        self.down = ""
        """Why the process does not answer any more."""

    async def start(self) -> None:
        """Connect to the cluster. Raises ConfigError where Ray is not installed or the cluster is
        open to strangers, Unavailable where it does not answer."""
        if importlib.util.find_spec("ray") is None:
            cure = "Ray is not installed: pip install 'ballast-serve[ray]'"
            raise ConfigError("--ray", self._address, cure)
        ours, theirs = socket.socketpair()
        with theirs:
            ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ballast.cluster.hosts.ray_process"),
                *("--ray", self._address, "--fleet", self._fleet, "--fd", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=child_environment(ray),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        connected = self._waiting[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))
        try:
            answer = await asyncio.wait_for(connected, START_SECONDS)
        except TimeoutError:
            raise Unavailable(f"Ray at {self._address} did not answer") from None
        if answer.error:
            raise Unavailable(f"Ray at {self._address}: {answer.error}")
        if (why := objection(answer.addresses, os.environ)) is not None:
            raise ConfigError("--ray", self._address, why)
        self._ready = True

    async def hosts(self) -> dict[str, HostInfo]:
        """Return the hosts that there are, by node."""
        return (await self._ask(HostsMsg)).hosts

    async def kept(self) -> tuple[list[str], dict[str, str]]:
        """Return the nodes whose agents a server of this fleet has left, and the hosts of the
        devices whose resources it had reserved."""
        answer = await self._ask(KeptMsg)
        return list(answer.nodes), answer.reserved

    async def reserve(
        self, device: str, need: DeviceNeed, avoid: Collection[str], doubtful: Collection[str]
    ) -> str:
        """Reserve what a device needs on a host, and return the host; waits until one has room."""
        hosts = tuple(avoid), tuple(doubtful)
        answer = await self._ask(lambda id: ReserveHostMsg(id, device, need, *hosts))
        return answer.node

    async def release(self, device: str) -> None:
        """Free what was reserved for a device, or what it waits for."""
        await self._ask(lambda id: ReleaseHostMsg(id, device))

    async def open(
        self, node: str, worker_command: Sequence[str], *, anew: bool
    ) -> tuple[str, str]:
        """Start an agent on a host that has none; returns its public key, and the address of the
        server's host. `anew`: in place of the one that it has."""
        answer = await self._ask(lambda id: OpenHostMsg(id, node, tuple(worker_command), anew))
        return answer.key, answer.ip

    async def connect(self, node: str, address: str, key: str) -> None:
        """Have a host's agent connect to the server."""
        await self._ask(lambda id: ConnectHostMsg(id, node, address, key))

    async def open_relay(self, node: str, ip: str, port: int, *, anew: bool) -> tuple[str, str]:
        """Start an HTTP relay on a host that has none; returns its public key, and the address of
        the server's host. `anew`: in place of the one that it has."""
        answer = await self._ask(lambda id: OpenRelayMsg(id, node, ip, port, anew))
        return answer.key, answer.ip

    async def connect_relay(self, node: str, address: str, key: str) -> None:
        """Have a host's relay connect to the server."""
        await self._ask(lambda id: ConnectRelayMsg(id, node, address, key))

    async def _ask(self, make: Callable[[int], RayRequest]) -> RayAnswer:
        if self.down or self._writer is None:
            raise Unavailable(self.down or "not connected with Ray")
        id = next(self._numbers)
        answered = self._waiting[id] = asyncio.get_running_loop().create_future()
        self._writer.write(msgspec.json.encode(make(id)) + b"\n")
        answer: RayAnswer = await answered
        if answer.error:
            raise Unavailable(answer.error)
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.json.Decoder(RayAnswer)
        try:
            while line := await reader.readline():
                answer = decoder.decode(line)
                waiting = self._waiting.pop(answer.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        finally:
            self.down = "the process that speaks to Ray has ended"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result(RayAnswer(0, error=self.down))
            self._waiting.clear()

    async def close(self) -> None:
        """End the process, and what it has started and reserved."""
        if self._reading is not None and self._ready:
            with contextlib.suppress(Unavailable, TimeoutError):
                await asyncio.wait_for(self._ask(EndFleetMsg), END_SECONDS)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 5.0)
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})
