"""Keep an HTTP relay on each host connected with the server.

A relay outlives its server: the next one, on whatever host, finds it and has it connect there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from ballast.cluster.hosts.host_choice import HostInfo
from ballast.cluster.hosts.relay_connection import OtherVersion, RelayConnection
from ballast.core.errors import BallastError, Unavailable

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Interval of looks for hosts that have no relay."""
MEET_SECONDS = 15.0
"""Time for a relay to connect."""


class RelayProvider(Protocol):
    """What runs relays on hosts; `RayCluster` is one."""

    async def hosts(self) -> dict[str, HostInfo]: ...

    async def open_relay(self, node: str, ip: str, port: int, *, anew: bool) -> tuple[str, str]: ...

    async def connect_relay(self, node: str, address: str, key: str) -> None: ...


class HttpRelays:
    """The relays of all hosts, at one port."""

    def __init__(self, provider: RelayProvider, port: int) -> None:
        self._provider, self._port = provider, port
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._whys: dict[str, str] = {}
        """Why a host's relay could not be used at the last attempt."""
        self._old = set[str]()
        """Hosts whose relay is of another version."""
        self._looking: asyncio.Task[None] | None = None

    def answer(self, accept: Callable[[], asyncio.Protocol]) -> None:
        """Begin to answer. `accept`: as of `RelayConnection`."""
        self._looking = asyncio.create_task(self._look(accept))

    async def close(self) -> None:
        """Leave the relays, which go on without a server."""
        tasks = [task for task in (self._looking, *self._serving.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self, accept: Callable[[], asyncio.Protocol]) -> None:
        """Serve each host's relay, those of new hosts as well."""
        while True:
            hosts: dict[str, HostInfo] = {}
            with contextlib.suppress(Unavailable):  # its process has ended, which others report
                hosts = await self._provider.hosts()
            self._serving = {n: task for n, task in self._serving.items() if not task.done()}
            for node in hosts.keys() - self._serving.keys():
                self._serving[node] = asyncio.create_task(self._serve(node, hosts[node], accept))
            await asyncio.sleep(LOOK_SECONDS)

    async def _serve(
        self, node: str, host: HostInfo, accept: Callable[[], asyncio.Protocol]
    ) -> None:
        """Take the clients of a host's relay, until the connection to it is lost."""
        connection = None
        try:
            anew = node in self._old
            key, ip = await self._provider.open_relay(node, host.ip, self._port, anew=anew)
            self._old.discard(node)
            connection = RelayConnection(ip, key, accept)
            await self._provider.connect_relay(node, connection.address, connection.key)
            await connection.meet(MEET_SECONDS)
            assert connection.hello is not None
            self._whys.pop(node, None)
            where = connection.hello
            log.info("host %s answers at http://%s:%d", host.name, where.host, where.port)
            await connection.run()
            log.warning("the HTTP relay of host %s is gone", host.name)
        except BallastError as error:
            if isinstance(error, OtherVersion):
                self._old.add(node)
            if self._whys.get(node) != str(error):
                log.error("no HTTP relay on host %s: %s", host.name, error)
            self._whys[node] = str(error)
        finally:
            if connection is not None:
                connection.close()
