"""Connect server and worker by ZeroMQ over a Unix socket in a private directory, one per worker.

Used by `LocalWorker` (server's end, on the event loop) and `Worker` (worker's end, on the main
thread). No message is dropped: high-water marks are off, and messages in flight are bounded by
clients' open requests.
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
from typing import Self

import zmq

from ballast.core.errors import DeviceError
from ballast.transport.worker_messages.codec import (
    ToServer,
    ToWorker,
    decode_to_server,
    decode_to_worker,
    encode,
)

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


class ServerSocket:
    """The server's end, on the running event loop.

    Reads ZeroMQ's file descriptor itself: `zmq.asyncio` takes a third of a server's time where
    every message is a token.
    """

    def __init__(self, directory: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address(directory))
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

    @property
    def has_message(self) -> bool:
        """Whether a message has been received that `take` has not returned."""
        return bool(self._received)

    def send(self, message: ToWorker) -> None:
        """Queue `message`; never waits. Messages go in the order of the calls."""
        self._unsent.append(encode(message))
        self._pump()

    def take(self) -> ToServer:
        """Return the next message; there must be one. Raises MalformedMessage."""
        return decode_to_server(self._received.popleft())

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

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()


class WorkerSocket:
    """The worker's end; all calls from one thread. Leaving its context sends queued messages."""

    def __init__(self, directory: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 10_000  # ms; queued messages are sent unless the server has ended
        self._socket.connect(address(directory))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._context.term()

    def also_wake_on(self, fd: int) -> None:
        """Make `wait` also return when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, message: ToServer) -> None:
        """Queue `message`; never waits."""
        self._socket.send(encode(message))

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
