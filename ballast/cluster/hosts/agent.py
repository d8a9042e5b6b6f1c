"""Keep the workers of one host for a server that is elsewhere.

Run by `agent_process`, on an event loop. The agent starts, kills and reaps workers' processes as
the server orders, and owns what the workers of a host share: their segments of weights, which it
exchanges with the agents of other hosts. When its connection to the server is lost it ends, and its
workers with it: the server takes them for dead by then, and has their requests answered elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from ballast.cluster.hosts.model_exchange import ModelExchange, machine
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.local_process import COMMAND, LocalProcess
from ballast.transport.curve import CurveClient, CurveLink, pipe_of
from ballast.transport.host_messages import (
    CloseWorkerMsg,
    ConfigureHostMsg,
    ForgetModelMsg,
    HostBeatMsg,
    HostHelloMsg,
    KillWorkerMsg,
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
    """The workers of this host, by the server's numbers."""

    def __init__(self, keys: CurveLink, command: Sequence[str] = COMMAND) -> None:
        self._socket: LoopSocket[ToHost] = LoopSocket(CurveClient(keys), decode_to_host)
        self._command = tuple(command)
        self._broker: SegmentBroker | None = None
        self._models: ModelExchange | None = None
        self._workers: dict[int, LocalProcess] = {}
        self._starting: dict[int, asyncio.Future[None]] = {}
        """Starts of workers, which end before these can be killed or closed."""
        self._tasks = set[asyncio.Future[None]]()

    async def run(self) -> None:
        """Serve until the connection is lost; all workers have ended then."""
        beating = asyncio.ensure_future(self._beat())
        try:
            while not self._socket.lost:
                while self._socket.has_message:
                    self._handle(self._socket.take())
                await self._socket.change()
        finally:
            beating.cancel()
            if self._models is not None:
                await self._models.close()
            await asyncio.gather(*self._starting.values())
            await asyncio.gather(*(w.close(0.0) for w in self._workers.values()))
            self._socket.close()

    def _handle(self, message: ToHost) -> None:
        match message:
            case ConfigureHostMsg():
                self._configure(message)
            case StartWorkerMsg():
                self._starting[message.id] = self._do(self._start(message))
            case KillWorkerMsg():
                self._do(self._kill(message))
            case CloseWorkerMsg():
                self._do(self._close(message))
            case ForgetModelMsg():
                if self._broker is not None:
                    self._broker.forget(message.model)
            case SendModelMsg() | ReceiveModelMsg() | ReadFilesMsg():
                if self._models is not None:
                    self._models.handle(message)

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _configure(self, message: ConfigureHostMsg) -> None:
        broker = self._broker = SegmentBroker(message.writable)
        broker.others = self._models = ModelExchange(broker, message.writable, self._socket.send)
        self._socket.send(
            HostHelloMsg(
                socket.gethostname(),
                len(os.sched_getaffinity(0)),
                broker.link.path,
                broker.peer_link.path,
                read_proof(message.proof),
                machine(),
            )
        )

    async def _start(self, message: StartWorkerMsg) -> None:
        id = message.id
        worker = self._workers[id] = LocalProcess(self._command, self._broker)
        options = ["--spare"] if message.spare else []
        link = None if message.keys is None else pipe_of(message.keys)
        if link is None:
            options += ("--dir", message.directory)
        try:
            await worker.spawn(*options, link=link, ended=lambda: self._ended(id, worker))
        except OSError as error:
            self._socket.send(WorkerEndedMsg(id, f"it could not be started: {error}"))
        finally:
            if link is not None:
                os.close(link)

    def _ended(self, id: int, worker: LocalProcess) -> None:
        """Report that a process has ended."""
        in_flight = worker.in_flight() if id in self._workers else ()
        self._socket.send(WorkerEndedMsg(id, worker.exit_reason(), tuple(in_flight)))

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
        worker = await self._started(message.id)
        if worker is not None:
            await worker.close(message.patience)
            await asyncio.sleep(0)  # `_ended` has been called
            self._workers.pop(message.id, None)
            self._starting.pop(message.id, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            used = {
                id: activity
                for id, worker in self._workers.items()
                if worker.exited is not None and (activity := worker.activity()) is not None
            }
            self._socket.send(HostBeatMsg(used))


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
