"""Connect server and worker by ZeroMQ: over a Unix socket in a private directory, one per worker,
or over an encrypted connection (`curve`) where the worker is on another host.

Used by `LocalWorker` and `HostedWorker` (server's end, on the event loop), by both ends of a host's
link, and by `Worker` (worker's end, on the main thread). No message is dropped: high-water marks
are off, and messages in flight are bounded by clients' open requests. A connection between hosts
that breaks is never made again, since what was on its way is lost: both ends notice and give up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import msgspec
import zmq

from ballast.core.errors import DeviceError
from ballast.transport.connection_watch import ConnectionWatch
from ballast.transport.worker_messages.codec import (
    ToServer,
    ToWorker,
    decode_to_server,
    decode_to_worker,
    encode,
)

In = TypeVar("In")

LINGER_SECONDS = 10.0
"""Time in which a worker's queued messages are sent at its end, unless the server has ended."""
_SOCKET = "worker.sock"
_LONGEST_PATH = 107
"""Bytes of a path, without the final NUL, that fit in `sockaddr_un`."""


class PrivateDirectory:
    """A new directory that only this user can enter (mode 0700), removed by `close`."""

    def __init__(self) -> None:
        path = Path(tempfile.mkdtemp(prefix="ballast-"))
        if len(os.fsencode(path / _SOCKET)) > _LONGEST_PATH:
            path.rmdir()
            path = Path(tempfile.mkdtemp(prefix="ballast-", dir="/tmp"))
        self.path = path

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def address(directory: Path) -> str:
    """Return the address of the socket in `directory`. Raises DeviceError if it is too long."""
    path = directory / _SOCKET
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise DeviceError("bind", f"{path} has more than {_LONGEST_PATH} bytes")
    return f"ipc://{path}"


class Endpoint(Protocol):
    """Where one end of a connection is."""

    def attach(self, socket: zmq.Socket[bytes]) -> None:
        """Bind or connect the socket, which has no connection yet. Raises Unavailable."""

    def lost(self) -> bool:
        """Whether the connection has ended."""

    def connected(self) -> bool:
        """Whether the other end has connected, and the connection has not ended."""

    def filenos(self) -> list[int]:
        """Descriptors that are readable when the connection may have changed."""

    def close(self) -> None: ...


class UnixEndpoint:
    """A socket in a private directory. The worker, which ends with its server, does not watch the
    connection; the server does, to know that it has received all that the worker sent."""

    def __init__(self, directory: Path, *, binds: bool) -> None:
        self._address, self._binds = address(directory), binds
        self._watch: ConnectionWatch | None = None

    def attach(self, socket: zmq.Socket[bytes]) -> None:
        if self._binds:
            self._watch = ConnectionWatch(socket)
        (socket.bind if self._binds else socket.connect)(self._address)

    def lost(self) -> bool:
        return self._watch is not None and self._watch.read(connects=False)

    def connected(self) -> bool:
        return self._watch is not None and self._watch.connected

    def filenos(self) -> list[int]:
        return [] if self._watch is None else [self._watch.fileno()]

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


class LoopSocket(Generic[In]):
    """One end of a connection, on the running event loop.

    Reads ZeroMQ's file descriptor itself: `zmq.asyncio` takes a third of a server's time where
    every message is a token.
    """

    def __init__(self, endpoint: Endpoint, decode: Callable[[bytes], In]) -> None:
        """Raises Unavailable where the endpoint cannot listen or connect."""
        self._endpoint, self._decode = endpoint, decode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        try:
            endpoint.attach(self._socket)
        except BaseException:
            endpoint.close()
            self._socket.close()
            self._context.term()
            raise
        self._received: deque[bytes] = deque()
        self._unsent: deque[bytes] = deque()
        """Messages for a worker that has not connected."""
        self._change: asyncio.Future[None] | None = None
        """The future that `change` awaits."""
        self._loop = asyncio.get_running_loop()
        fd = self._socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._loop.add_reader(self._fd, self._pump)
        self._others = endpoint.filenos()
        for other in self._others:
            self._loop.add_reader(other, self._look)
        self.lost = False
        """Whether the connection has ended; all that came on it has been received."""
        if self._others:
            self._look()  # ZeroMQ's descriptors become readable only for what follows a reading

    @property
    def has_message(self) -> bool:
        """Whether a message has been received that `take` has not returned."""
        return bool(self._received)

    @property
    def connected(self) -> bool:
        """Whether the other end has connected, and may still send."""
        self._look()
        return self._endpoint.connected()

    def send(self, message: msgspec.Struct) -> None:
        """Queue `message`; never waits. Messages go in the order of the calls."""
        self._unsent.append(encode(message))
        self._pump()

    def take(self) -> In:
        """Return the next message; there must be one. Raises MalformedMessage."""
        return self._decode(self._received.popleft())

    async def change(self) -> None:
        """Wait for the next message that comes, or for `wake`. One caller at a time."""
        self._change = self._loop.create_future()
        try:
            await self._change
        finally:
            self._change = None

    def wake(self) -> None:
        """Make `change` return."""
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def _pump(self) -> None:
        """Receive and send whatever the socket is ready for.

        The descriptor is readable once for a change, which any call on the socket may take in: so
        on until there is nothing to receive, and nothing to send or nobody to send it to.
        """
        received = False
        while True:
            with contextlib.suppress(zmq.Again):
                while self._unsent:
                    self._socket.send(self._unsent[0], zmq.DONTWAIT)
                    self._unsent.popleft()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._received.append(self._socket.recv(zmq.DONTWAIT))
                    received = True
            if not self._unsent or not self._socket.getsockopt(zmq.EVENTS):
                break
        if received:
            self.wake()

    def _look(self) -> None:
        """Note whether the connection has ended."""
        if self._endpoint.lost() and not self.lost:
            self._pump()
            self.lost = True
            self.wake()

    def close(self) -> None:
        for fd in (self._fd, *self._others):
            self._loop.remove_reader(fd)
        self._endpoint.close()
        self._socket.close()
        self._context.term()


class ServerSocket(LoopSocket[ToServer]):
    """The server's end of a worker's connection."""

    def __init__(self, endpoint: Endpoint | Path) -> None:
        """`endpoint`: or the directory of a Unix socket."""
        if isinstance(endpoint, Path):
            endpoint = UnixEndpoint(endpoint, binds=True)
        super().__init__(endpoint, decode_to_server)


class WorkerSocket:
    """The worker's end; all calls from one thread. Leaving its context sends queued messages."""

    def __init__(self, endpoint: Endpoint | Path) -> None:
        """`endpoint`: or the directory of a Unix socket."""
        if isinstance(endpoint, Path):
            endpoint = UnixEndpoint(endpoint, binds=False)
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = round(LINGER_SECONDS * 1e3)
        endpoint.attach(self._socket)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        for fd in endpoint.filenos():
            self.also_wake_on(fd)
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether the connection has broken."""
        return self._endpoint.lost()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, *, at_once: bool = False) -> None:
        """Close the connection; a second call does nothing. `at_once`: the server has ended, and
        queued messages are dropped."""
        if self._closed:
            return
        self._closed = True
        if at_once:
            self._socket.linger = 0
        self._endpoint.close()
        self._socket.close()
        self._context.term()

    def also_wake_on(self, fd: int) -> None:
        """Make `wait` also return when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, message: ToServer) -> None:
        """Queue `message`; never waits. It is dropped if the connection has broken."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.DONTWAIT)

    def wait(self, seconds: float | None) -> None:
        """Wait for a message, a readable descriptor of `also_wake_on`, or the end of `seconds`."""
        self._poller.poll(None if seconds is None else max(0, round(seconds * 1e3)))

    def receive_all(self, handle: Callable[[ToWorker], None]) -> None:
        """Call `handle` with each message that has arrived. Raises MalformedMessage."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            handle(decode_to_worker(data))
