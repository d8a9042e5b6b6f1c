"""Connect the server with the agent of one host, and follow the workers' processes there.

Used by `HostedWorkers`, on the event loop. When the connection is lost, all processes of the host
count as ended: what they were doing ends within seconds, if it has not. The next connection finds
those in `kept` that the agent has kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ballast import __version__
from ballast.cluster.worker.liveness_watch import Activity
from ballast.core.errors import BallastError, Unavailable
from ballast.core.link import LinkSettings
from ballast.transport.curve import CurveLink, CurveServer
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
    KvReport,
    ModelReport,
    StartWorkerMsg,
    ToHost,
    WorkerEndedMsg,
    decode_from_host,
)
from ballast.transport.sockets import LoopSocket, PrivateDirectory

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""Time for an agent to end its workers, when the server stops."""


class HostedProcess:
    """A worker's process on another host, as its agent reports it."""

    def __init__(self, host: HostConnection, id: int) -> None:
        self._host, self.id = host, id
        self.exited: asyncio.Future[Any] | None = asyncio.get_running_loop().create_future()
        self._exit_reason = "it runs"
        self._in_flight: frozenset[str] | None = frozenset()
        self.used: Activity | None = None

    def activity(self) -> Activity | None:
        return self.used

    def kill(self, why: str) -> bool:
        assert self.exited is not None
        if self.exited.done():
            return False
        self._host.send(KillWorkerMsg(self.id, why))
        return True

    def exit_reason(self) -> str:
        return self._exit_reason

    def in_flight(self) -> frozenset[str] | None:
        return self._in_flight

    def ended(self, exit_reason: str, in_flight: frozenset[str] | None) -> None:
        """Note that it has ended; a second call changes nothing."""
        assert self.exited is not None
        if not self.exited.done():
            self._exit_reason, self._in_flight = exit_reason, in_flight
            self.exited.set_result(None)

    async def close(self, patience: float, late: Callable[[], object]) -> None:
        assert self.exited is not None
        self._host.send(CloseWorkerMsg(self.id, patience))
        await asyncio.wait({self.exited}, timeout=patience)
        if not self.exited.done():
            late()
            await self.exited
        self._host.release(self.id)


class HostConnection:
    """The server's end of the connection to one host."""

    def __init__(
        self,
        node: str,
        name: str,
        server_ip: str,
        agent_key: str,
        report: Callable[[HostConnection, ModelReport | KvReport | None], object],
        *,
        local: bool = True,
    ) -> None:
        """Listen for the agent. `node`: the host, as what has started the agent names it; `name`:
        as operators see it. `report`: called with what it reports of models and KV, and with None
        once it is gone. `local`: whether workers on the server's own host are connected by Unix
        sockets."""
        self.node, self.name = node, name
        self._report = report
        self._ip, self._local = server_ip, local
        self._end = CurveServer(server_ip, agent_key)
        self._socket: LoopSocket[FromHost] = LoopSocket(self._end, decode_from_host)
        self._numbers = itertools.count(1)
        self._processes: dict[int, HostedProcess] = {}
        self.hello: HostHelloMsg | None = None
        """What the agent said of its host; None: it has not connected."""
        self.kept: dict[int, str] = {}
        """Devices, by worker, that a server before this one has left, and nobody has taken."""
        self.gone = ""
        """Why the host cannot be used any more; empty: it can."""
        self._met = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    def __str__(self) -> str:
        return self.name

    @property
    def address(self) -> str:
        """Address that the agent connects to."""
        return self._end.address

    @property
    def key(self) -> str:
        """The server's public key."""
        return self._end.keys.public

    async def meet(self, writable: bool, seconds: float, keep_seconds: float) -> None:
        """Wait until the agent has connected. `keep_seconds`: for how long it keeps devices once
        this server is gone. Raises Unavailable."""
        directory = PrivateDirectory()
        proof, secret = directory.path / "proof", secrets.token_hex(32)
        try:
            if self._local:
                proof.write_text(secret)
            place = str(proof) if self._local else ""
            self.send(ConfigureHostMsg(writable, place, keep_seconds))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._met.wait(), seconds)
        finally:
            directory.close()
        if self.hello is None:
            self.lose(self.gone or f"its agent did not connect within {seconds:g} s")
            raise Unavailable(f"host {self.name}: {self.gone}")
        self._local = self._local and secrets.compare_digest(self.hello.proof, secret)

    @property
    def is_servers(self) -> bool:
        """Whether it is the server's own host, whose workers are connected by Unix sockets."""
        return self._local

    def sharing(self, link: LinkSettings) -> LinkSettings:
        """Return a device's link with the memory by which devices of that host pace it."""
        assert self.hello is not None
        memory = self.hello.link_memory if link.shared else ""
        peer = "" if link.peer_bytes_per_second is None else self.hello.peer_memory
        return replace(link, memory=memory, peer_memory=peer)

    @property
    def server_ip(self) -> str:
        """Address at which the server listens for this host."""
        return self._ip

    def start_worker(
        self, wake: Callable[[], None], *, keys: CurveLink | None, directory: str, spare: bool
    ) -> HostedProcess:
        """Have the agent start a worker's process. `wake`: called once it has ended. Raises
        Unavailable."""
        if self.gone:
            raise Unavailable(f"host {self.name}: {self.gone}")
        process = self._follow(next(self._numbers), wake)
        self.send(StartWorkerMsg(process.id, keys, directory, spare))
        return process

    def attach_worker(
        self, id: int, wake: Callable[[], None], *, keys: CurveLink | None, directory: str
    ) -> HostedProcess:
        """Have the agent connect a worker of `kept` with the server. `wake`: as of
        `start_worker`."""
        process = self._follow(id, wake)
        self.send(AttachWorkerMsg(id, keys, directory))
        return process

    def assign(self, id: int, device: str) -> None:
        """Have the agent keep a worker for the next server, as that of a device."""
        self.send(AssignWorkerMsg(id, device))

    def end_kept(self) -> None:
        """End the workers that nobody has taken."""
        for id in self.kept:
            self.send(CloseWorkerMsg(id, 0.0))
        self.kept = {}

    def _follow(self, id: int, wake: Callable[[], None]) -> HostedProcess:
        process = self._processes[id] = HostedProcess(self, id)
        assert process.exited is not None
        process.exited.add_done_callback(lambda _: wake())
        return process

    def forget(self, model: str) -> None:
        """Keep a model's segments there no longer."""
        self.send(ForgetModelMsg(model))

    def release(self, id: int) -> None:
        """Forget a process that has been closed."""
        self._processes.pop(id, None)

    def send(self, message: ToHost) -> None:
        """Queue a message; lost if the host is gone."""
        if not self.gone:
            self._socket.send(message)

    async def _read(self) -> None:
        socket = self._socket
        try:
            while not socket.lost and not self.gone:
                while socket.has_message:
                    self._handle(socket.take())
                if not socket.lost and not self.gone:
                    await socket.change()
            self.lose("the connection to it was lost")
        except BallastError as error:
            self.lose(f"its agent cannot be understood: {error}")

    def _handle(self, message: FromHost) -> None:
        match message:
            case HostHelloMsg():
                if message.version != __version__:
                    self.lose(f"it has ballast {message.version}, and the server {__version__}")
                    return
                self.hello, self.kept = message, dict(message.workers)
                self._numbers = itertools.count(max(self.kept, default=0) + 1)
                self._met.set()
            case WorkerEndedMsg():
                process = self._processes.get(message.id)
                if process is not None:
                    process.ended(message.exit_reason, frozenset(message.in_flight))
            case HostBeatMsg():
                for id, used in message.activity.items():
                    if (process := self._processes.get(id)) is not None:
                        process.used = used
            case _:
                self._report(self, message)

    def lose(self, why: str) -> None:
        """Take the host for dead: it and its workers are not heard any more."""
        if self.gone:
            return
        self.gone = why
        log.error("host %s is gone: %s", self.name, why)
        self._met.set()
        self._report(self, None)
        for process in self._processes.values():
            process.ended(f"its host {self.name} is gone: {why}", None)
        self._socket.close()

    async def close(self) -> None:
        """End the agent, and with it what runs there."""
        if not self.gone:
            self.send(EndHostMsg())
            self._reading.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    while not self._socket.lost:
                        await self._socket.change()
            self.gone = "the server is stopping"
            self._socket.close()
        self._reading.cancel()
        await asyncio.wait({self._reading})
