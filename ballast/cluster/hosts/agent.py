"""Keep the workers of one host for a server that is elsewhere.

Run by `agent_process`, on an event loop. The agent starts, kills and reaps workers' processes as
the server orders, and owns what the workers of a host share: their segments of weights, which it
exchanges with the agents of other hosts, as it does KV.

When its connection to the server is lost, the server takes all workers for dead, and has their
requests answered elsewhere. The agent then keeps those that serve devices for the next server:
without requests, but with weights and KV. If none comes in time, they end with the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ballast.cluster.hosts.kv_exchange import KvExchange
from ballast.cluster.hosts.model_exchange import ModelExchange, machine
from ballast.cluster.hosts.server_inbox import Server
from ballast.cluster.hosts.worker_forwarder import WorkerForwarder
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.early_process import COMMAND
from ballast.cluster.worker.local_process import LocalProcess
from ballast.cluster.worker.renewals import Renewal
from ballast.core.errors import BallastError
from ballast.transport.curve import CurveClient, CurveKeys, CurveLink, pipe_of
from ballast.transport.host_messages import (
    AssignWorkerMsg,
    AttachWorkerMsg,
    CloseWorkerMsg,
    ConfigureHostMsg,
    EndHostMsg,
    ForgetModelMsg,
    FromHost,
    HostBeatMsg,
    HostHelloMsg,
    KillWorkerMsg,
    ListenKvMsg,
    OfferKvMsg,
    ReachHostMsg,
    ReadFilesMsg,
    ReceiveModelMsg,
    SendModelMsg,
    StartWorkerMsg,
    ToHost,
    WorkerEndedMsg,
    decode_to_host,
)
from ballast.transport.sockets import LoopSocket

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_LONGEST_PROOF = 256


class HostAgent:
    """The workers of this host, by numbers that its servers give them."""

    def __init__(self, keys: CurveKeys, command: Sequence[str] = COMMAND) -> None:
        self._keys = keys
        self._socket: LoopSocket[ToHost] | None = None
        """The connection to the present server."""
        self._command = tuple(command)
        self._broker: SegmentBroker | None = None
        self._models: ModelExchange | None = None
        self._kv: KvExchange | None = None
        self._workers: dict[int, LocalProcess] = {}
        self._devices: dict[int, str] = {}
        """Of workers that serve one."""
        self._starting: dict[int, asyncio.Future[None]] = {}
        """Starts of workers, which end before these can be killed or closed."""
        self._tasks = set[asyncio.Future[None]]()
        self._keep_seconds = 0.0
        self._ending = False

    async def serve(self, server: Server) -> float:
        """Serve one server until the connection to it is lost; return for how long its devices are
        kept, seconds; 0: they have ended."""
        link = CurveLink(server.address, server.key, self._keys)
        socket: LoopSocket[ToHost] = LoopSocket(CurveClient(link), decode_to_host)
        self._socket = socket
        beating = asyncio.ensure_future(self._beat())
        try:
            while not socket.lost and not self._ending:
                while socket.has_message and not self._ending:
                    self._handle(socket.take())
                if not socket.lost and not self._ending:
                    await socket.change()
        finally:
            beating.cancel()
            await self._leave_server()
            self._socket = None
            socket.close()
        return self._keep_seconds if self._workers else 0.0

    async def close(self) -> None:
        """End all workers."""
        if self._models is not None:
            await self._models.close()
        if self._kv is not None:
            await self._kv.close()
        await asyncio.gather(*self._starting.values())
        await asyncio.gather(*(w.close(0.0) for w in self._workers.values()))
        self._workers.clear()

    async def _leave_server(self) -> None:
        """Keep the workers that serve devices, and end the others."""
        if self._ending or not self._keep_seconds:
            await self.close()
            return
        if self._models is not None:
            self._models.server_gone()
        await asyncio.gather(*self._starting.values())
        for id, worker in list(self._workers.items()):
            if id in self._devices and worker.exited is not None and not worker.exited.done():
                worker.renew(Renewal())
            else:
                await self._drop(id, 0.0)

    def _handle(self, message: ToHost) -> None:
        match message:
            case ConfigureHostMsg():
                self._configure(message)
            case StartWorkerMsg():
                self._starting[message.id] = self._do(self._start(message))
            case AssignWorkerMsg():
                self._devices[message.id] = message.device
            case AttachWorkerMsg():
                self._do(self._attach(message))
            case KillWorkerMsg():
                self._do(self._kill(message))
            case CloseWorkerMsg():
                self._do(self._close(message))
            case EndHostMsg():
                self._ending = True
            case ForgetModelMsg():
                if self._broker is not None:
                    self._broker.forget(message.model)
            case SendModelMsg() | ReceiveModelMsg() | ReadFilesMsg():
                if self._models is not None:
                    self._models.handle(message)
            case OfferKvMsg() | ListenKvMsg() | ReachHostMsg():
                if self._kv is not None:
                    self._kv.handle(message)

    def _send(self, message: FromHost) -> None:
        """Queue a message; lost while there is no server."""
        if self._socket is not None:
            self._socket.send(message)

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _configure(self, message: ConfigureHostMsg) -> None:
        self._keep_seconds = message.keep_seconds
        if self._broker is None:
            self._broker = SegmentBroker(message.writable)
            self._models = ModelExchange(self._broker, message.writable, self._send)
            self._broker.others = self._models
            self._kv = KvExchange(self._send)
        broker, exchange = self._broker, self._models
        assert exchange is not None
        self._send(
            HostHelloMsg(
                socket.gethostname(),
                len(os.sched_getaffinity(0)),
                broker.link.path,
                broker.peer_link.path,
                read_proof(message.proof),
                machine(),
                tuple(self._devices.items()),
            )
        )
        for model, kind, _ in broker.models.items():
            exchange.changed(model, kind, True)

    async def _start(self, message: StartWorkerMsg) -> None:
        id = message.id
        worker = self._workers[id] = LocalProcess(self._command, self._broker)
        options = ["--spare"] if message.spare else []
        if self._kv is not None and self._kv.door:
            options += ("--hosts", self._kv.door)
        link = None if message.keys is None else pipe_of(message.keys)
        if link is None:
            options += ("--dir", message.directory)
        try:
            ended = partial(self._ended, id, worker)
            await worker.spawn(*options, link=link, renewable=True, ended=ended)
        except OSError as error:
            self._send(WorkerEndedMsg(id, f"it could not be started: {error}"))
        finally:
            if link is not None:
                os.close(link)

    def _ended(self, id: int, worker: LocalProcess) -> None:
        """Report that a process has ended."""
        in_flight = worker.in_flight() if id in self._workers else ()
        self._send(WorkerEndedMsg(id, worker.exit_reason(), tuple(in_flight)))

    async def _attach(self, message: AttachWorkerMsg) -> None:
        """Connect a kept worker with the server; on another host, for as long as that lasts."""
        if (kept := self._workers.get(message.id)) is None:
            return
        if message.keys is None:
            kept.renew(Renewal(directory=message.directory))
            return
        try:
            forwarder = WorkerForwarder(message.keys.address)
            await forwarder.listen()
        except (OSError, BallastError) as error:
            log.warning("worker %d cannot be kept: %s", message.id, error)
            await self._drop(message.id, 0.0)
            return
        kept.renew(Renewal(msgspec.structs.replace(message.keys, address=forwarder.address)))
        await forwarder.run()

    async def _kill(self, message: KillWorkerMsg) -> None:
        worker = await self._started(message.id)
        if worker is not None and worker.exited is not None:
            worker.kill(message.why)

    async def _started(self, id: int) -> LocalProcess | None:
        """Return a worker once it has been started; None: it has been closed."""
        if (starting := self._starting.get(id)) is not None:
            await starting
        return self._workers.get(id)

    async def _close(self, message: CloseWorkerMsg) -> None:
        if await self._started(message.id) is not None:
            await self._drop(message.id, message.patience)

    async def _drop(self, id: int, patience: float) -> None:
        """End a worker that has been started, and forget it."""
        await self._workers[id].close(patience)
        await asyncio.sleep(0)  # `_ended` has been called
        self._workers.pop(id, None)
        self._starting.pop(id, None)
        self._devices.pop(id, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            used = {
                id: activity
                for id, worker in self._workers.items()
                if worker.exited is not None and (activity := worker.activity()) is not None
            }
            self._send(HostBeatMsg(used))


def read_proof(path: str) -> str:
    """Return the content of a file that only this user of the server's host can read; empty: it is
    not here."""
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return ""
            return file.read(_LONGEST_PROOF).decode()
    except (OSError, ValueError):
        return ""
