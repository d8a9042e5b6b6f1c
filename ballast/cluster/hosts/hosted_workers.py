"""The hosts of a server, and the workers of devices on them: a `WorkerSource`.

A device stays on its host while that can be used. A host that is gone or drained gives its devices
to others: their next workers start there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ballast.cluster.hosts.host_choice import DeviceNeed, needs_of
from ballast.cluster.hosts.host_connection import HostConnection
from ballast.cluster.hosts.hosted_worker import HostedWorker
from ballast.cluster.hosts.http_relays import HttpRelays, RelayProvider
from ballast.cluster.hosts.kv_paths import HostExchanges
from ballast.cluster.hosts.ray_cluster import RayCluster
from ballast.cluster.placing import part_of
from ballast.cluster.worker.early_process import COMMAND
from ballast.cluster.worker.spare_worker import SpareWorker
from ballast.core.errors import BallastError, ConfigError, Unavailable
from ballast.core.migration import Piece, at_host, too_long
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.policy.presets import preset_of
from ballast.transport.host_messages import (
    KvReport,
    ModelReport,
    OfferKvMsg,
)

log = logging.getLogger(__name__)

MEET_SECONDS = 60.0
"""Time for a host's agent to connect."""
KEEP_SECONDS = 60.0
"""Time for which hosts keep their devices once the server is gone: for the next one."""


class HostProvider(RelayProvider, Protocol):
    """What places devices on hosts; `RayCluster` is one."""

    async def start(self) -> None: ...

    async def kept(self) -> tuple[list[str], dict[str, str]]:
        """Return the nodes whose agents a server of this fleet has left, and the hosts of the
        devices whose resources it had reserved."""

    async def reserve(
        self, device: str, need: DeviceNeed, avoid: Collection[str], doubtful: Collection[str]
    ) -> str: ...

    async def open(
        self, node: str, worker_command: Sequence[str], *, anew: bool
    ) -> tuple[str, str]: ...

    async def connect(self, node: str, address: str, key: str) -> None: ...

    async def release(self, device: str) -> None:
        """Free what was reserved for a device, or what it waits for. Raises Unavailable."""

    async def close(self) -> None: ...


def check_hosted(fleet: FleetSettings) -> None:
    """Raise ConfigError for what a fleet cannot have on many hosts."""
    for i, (device, _) in enumerate(fleet.devices.values()):
        if device.gpu is not None or device.tensor_parallel > 1:
            raise ConfigError(f"devices[{i}].name", device.name, "hosts of Ray have CPUs so far")
    if fleet.kv.host_bytes:
        raise ConfigError("kv_host", fleet.kv.host_bytes, "not kept on many hosts so far")
    if fleet.standby and not preset_of(fleet).fleet.moves:
        allowed = "with a placement that moves models, as `follow`: nothing comes there else"
        raise ConfigError("hosts.least", len(fleet.devices) - len(fleet.standby), allowed)
    for i, model in enumerate(fleet.models):
        if on_standby := set(model.devices).intersection(fleet.standby):
            raise ConfigError(
                f"models[{i}].devices", min(on_standby), "a device that always serves"
            )


def fleet_id(file: Path, named: str = "") -> str:
    """Return by what a fleet is known on its cluster: its name, or a digest of its file's path.
    A server that is restarted, on this host or another, has the same."""
    return named or hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class RayHosts:
    """The hosts of a Ray cluster."""

    address: str
    """Of the cluster."""
    http: int | None = None
    """Port at which each host answers HTTP; None: the server's own alone."""
    fleet: str = "fleet"
    """Which fleet this is, of those on the cluster: a server that is restarted finds its own."""
    local: bool = True
    """As of `HostConnection`."""


async def hosted_on_ray(
    ray: RayHosts, fleet: FleetSettings, worker_command: Sequence[str]
) -> HostedWorkers:
    """Return workers on the nodes of a Ray cluster, connected. Raises ConfigError and
    Unavailable."""
    command = () if tuple(worker_command) == COMMAND else worker_command  # of each host's Python
    cluster = RayCluster(ray.address, ray.fleet)
    workers = HostedWorkers(cluster, fleet, command, local=ray.local, http=ray.http)
    try:
        await workers.start()
    except BaseException:
        await workers.close()
        raise
    return workers


class HostedWorkers:
    """Workers on the hosts of a provider."""

    def __init__(
        self,
        provider: HostProvider,
        fleet: FleetSettings,
        worker_command: Sequence[str] = (),
        *,
        local: bool = True,
        http: int | None = None,
    ) -> None:
        """`worker_command`: empty: the workers of this package. `local`: as of `HostConnection`;
        `http`: as of `RayHosts`."""
        check_hosted(fleet)
        self._provider, self._fleet, self._local = provider, fleet, local
        self._command = tuple(worker_command)
        self._relays = None if http is None else HttpRelays(provider, http)
        self._needs: dict[str, DeviceNeed] = {}
        self._links: dict[str, HostConnection] = {}
        """The latest connection to each host, by node."""
        self._opening: dict[str, asyncio.Lock] = {}
        self._nodes: dict[str, str] = {}
        """Host of each device."""
        self._spares: dict[str, SpareWorker[HostedWorker]] = {}
        self._drained: dict[str, list[str]] = {}
        """Names of hosts that get no device, with those that they had when they were drained."""
        self._kept: dict[str, HostedWorker] = {}
        """Workers of devices since before this server, until these are started."""
        self._failed = set[str]()
        """Hosts whose agents did not connect at the last attempt."""
        self._exchanges = HostExchanges()
        self._reserving: dict[str, asyncio.Future[str]] = {}
        """Devices that wait for a host."""
        self._wanted = {device: asyncio.Event() for device in fleet.standby}
        """Of devices that are not always wanted."""
        self._releasing = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Connect to the provider, and to the workers that a server before this one has left.
        Raises ConfigError and Unavailable."""
        await self._provider.start()
        hosts = await self._provider.hosts()
        self._needs = needs_of(self._fleet, {node: host.cpus for node, host in hosts.items()})
        nodes, reserved = await self._provider.kept()
        await asyncio.gather(*(self._find_kept(node, reserved) for node in nodes))
        for device in self._wanted.keys() & reserved.keys():
            await self._provider.release(device)
        log.info("%d devices on %d hosts", len(self._needs), len(hosts))
        if self._kept:
            log.warning("%d devices serve since before this server", len(self._kept))

    async def _find_kept(self, node: str, reserved: Mapping[str, str]) -> None:
        """Connect to a host that has an agent. Raises Unavailable if it does not connect though the
        host is there: it may have another server."""
        try:
            await self._take_kept(await self._link(node), reserved)
        except Unavailable as error:
            if node in await self._provider.hosts():
                raise
            log.warning("a host was not kept: %s", error)

    async def _take_kept(self, link: HostConnection, reserved: Mapping[str, str]) -> None:
        """Take the workers of a host whose devices this fleet has and would start as they are; end
        the others."""
        for id, device in list(link.kept.items()):
            if reserved.get(device) != link.node or device not in self._needs:
                continue
            if device in self._wanted:
                continue  # it begins on standby
            worker, serves = self._new(device), False
            del link.kept[id]
            try:
                async with asyncio.timeout(MEET_SECONDS):
                    part = part_of(self._fleet, device, (), 1)
                    serves = await worker.attach(link, id, self._needs[device].cpus, part)
            except (Unavailable, TimeoutError) as error:
                log.warning("%s was not kept: %s", device, error)
            if serves and device not in self._kept:
                self._kept[device] = worker
                self._nodes[device] = link.node
            else:
                await worker.close()
        link.end_kept()

    def answer_http(self, accept: Callable[[], asyncio.Protocol]) -> None:
        """Have each host answer HTTP from now on, if it is to, by protocols that `accept` makes."""
        if self._relays is not None:
            self._relays.answer(accept)

    def connection_of(self, device: str) -> HostConnection | None:
        """Return the connection to a device's host; None: it has none now."""
        link = self._links.get(self._nodes.get(device, ""))
        return None if link is None or link.gone else link

    def host_of(self, device: str) -> str:
        link = self.connection_of(device)
        return "" if link is None else link.name

    def offer_kv(
        self, device: str, reader: str, address: str, pieces: Sequence[Piece]
    ) -> str | None:
        source, target = self.connection_of(device), self.connection_of(reader)
        if source is None or target is None:
            return None
        if source is target:
            return address
        network = None if self._fleet.hosts is None else self._fleet.hosts.network
        if too_long(pieces, network):
            return None
        ticket = secrets.token_hex(16)
        source.send(OfferKvMsg(ticket, target.node, address, tuple(pieces)))
        return at_host(source.node, ticket)

    def stands_by(self, device: str) -> bool:
        return device in self._wanted and not self._wanted[device].is_set()

    def want(self, device: str, wanted: bool) -> None:
        if wanted:
            self._wanted[device].set()
            return
        self._wanted[device].clear()
        self._nodes.pop(device, None)
        releasing = asyncio.ensure_future(self._release(device))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, device: str) -> None:
        try:
            await self._provider.release(device)
        except Unavailable as error:
            log.warning("the room of %s is not freed: %s", device, error)

    def waits(self, device: str) -> bool:
        return device in self._reserving

    async def set_drained(self, host: str, drained: bool) -> list[str] | None:
        if host in self._needs:
            return None  # a device
        known = {info.name for info in (await self._provider.hosts()).values()}
        if host not in known | self._drained.keys():
            return None
        before = self._drained.pop(host, [])
        here = [device for device in self._needs if self.host_of(device) == host]
        concerned = sorted({*before, *here})
        if drained:
            self._drained[host] = concerned
        for reserving in self._reserving.values():
            reserving.cancel()
        return concerned

    def first(self, device: str) -> HostedWorker:
        return self._kept.pop(device, None) or self._new(device)

    def _new(self, device: str) -> HostedWorker:
        return HostedWorker(partial(self._find, device), device)

    async def next(self, device: str) -> HostedWorker:
        link, threads = await self._find(device)
        spare = self._spares.get(link.node)
        worker = None if spare is None else spare.take()
        if worker is None:
            return self._new(device)
        worker.take(device, threads)
        return worker

    async def prepare(self, limits: ServerSettings) -> None:
        for node in set(self._nodes.values()):
            link = self._links.get(node)
            if link is None or link.gone:
                continue
            if node not in self._spares:
                make = partial(HostedWorker, partial(self._spare_host, node))
                self._spares[node] = SpareWorker(make)
            self._spares[node].prepare(limits)

    async def close(self) -> None:
        if self._relays is not None:
            await self._relays.close()
        await asyncio.gather(*(spare.close() for spare in self._spares.values()))
        await asyncio.gather(*(worker.close() for worker in self._kept.values()))
        await asyncio.gather(*(link.close() for link in self._links.values()))
        await self._provider.close()

    def forget(self, model: str) -> None:
        """Keep the segments of a model no longer: it has left the fleet."""
        for link in self._links.values():
            link.forget(model)

    async def _spare_host(self, node: str) -> tuple[HostConnection, int | None]:
        link = self._links.get(node)
        if link is None or link.gone:
            raise Unavailable(f"host {node} is gone")
        return link, None

    async def _find(self, device: str) -> tuple[HostConnection, int]:
        """Return the host of a device, with its threads; waits until one has room. Raises
        Unavailable."""
        if device in self._wanted:
            await self._wanted[device].wait()
        node = self._nodes.get(device)
        link = self._links.get(node or "")
        if node is None or (link is not None and (link.gone or link.name in self._drained)):
            node = self._nodes[device] = await self._reserve(device)
        try:
            link = await self._link(node)
            link.end_kept()
            return link, self._needs[device].cpus
        except BallastError:
            self._nodes.pop(device, None)  # another host, the next time
            raise

    async def _reserve(self, device: str) -> str:
        """Return a host for a device, which is not drained; begins anew where that changes."""
        while True:
            names = {node: host.name for node, host in (await self._provider.hosts()).items()}
            avoid = [node for node, name in names.items() if name in self._drained]
            gone = {node for node, link in self._links.items() if link.gone}
            reserving = asyncio.ensure_future(
                self._provider.reserve(device, self._needs[device], avoid, gone)
            )
            self._reserving[device] = reserving
            try:
                await asyncio.wait({reserving})
            finally:
                del self._reserving[device]
                reserving.cancel()
            if not reserving.cancelled() and names.get(reserving.result()) not in self._drained:
                return reserving.result()

    def _report(self, host: HostConnection, report: ModelReport | KvReport | None) -> None:
        """Have hosts send models and KV to each other."""
        for node, order in self._exchanges.handle(host.node, report):
            self._links[node].send(order)

    async def _link(self, node: str) -> HostConnection:
        """Return the connection to a host, made anew where there is none or it was lost."""
        async with self._opening.setdefault(node, asyncio.Lock()):
            link = self._links.get(node)
            if link is not None and not link.gone:
                return link
            host = (await self._provider.hosts()).get(node)
            if host is None:
                raise Unavailable(f"host {node} is gone")
            anew = node in self._failed
            self._failed.add(node)
            key, ip = await self._provider.open(node, self._command, anew=anew)
            made = HostConnection(node, host.name, ip, key, self._report, local=self._local)
            self._links[node] = made
            await self._provider.connect(node, made.address, made.key)
            await made.meet(self._fleet.has_gpus, MEET_SECONDS, KEEP_SECONDS)
            self._failed.discard(node)
            assert made.hello is not None
            self._exchanges.join(node, host.ip, made.hello.machine)
            where = "the server's own host" if made.is_servers else "over TCP"
            log.info("host %s is connected, %s", host.name, where)
            return made
