"""Limit the number of client connections, and how long one may send or read nothing.

`limited` adds the limits to uvicorn's protocol class; `Connections` counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from ballast.server.http.file_limit import OTHER_FILES, SPARE, raise_file_limit

HEAD_SECONDS = 20.0
"""Seconds for the head of a request, from its first byte; for the first request, from the
connection's start."""
SEND_SECONDS = 60.0
"""Seconds in which a client must read `LEAST_READ` of the data written to it, or all of it."""
LEAST_READ = 16 << 10
"""Bytes that a client must read in `SEND_SECONDS`."""
DEAD_SECONDS = 120
"""Seconds after which a peer that acknowledges nothing counts as gone."""


class Connections:
    """Counts open and idle connections, and bounds their number."""

    def __init__(
        self, most: Callable[[], int], other_files: Callable[[], int] = lambda: OTHER_FILES
    ) -> None:
        """`most`: bound set by the operator; `other_files`: number of open files that are no
        connections."""
        self._most, self._other_files = most, other_files
        self._files = raise_file_limit()
        self._idle: dict[Any, None] = {}
        """Connections on which no request is being answered, longest idle first."""
        self.open = 0

    @property
    def most(self) -> int:
        """Most connections: the operator's bound, or less where the process may open too few
        files."""
        return max(1, min(self._most(), self._files - SPARE - self._other_files()))

    @property
    def full(self) -> bool:
        return self.open > self.most

    @property
    def idle(self) -> int:
        """Number of connections on which no request is being answered."""
        return len(self._idle)

    def idles(self, connection: Any) -> None:
        """Record that no request is being answered on the connection from now on."""
        self._idle[connection] = None

    def works(self, connection: Any) -> None:
        """Record that a request is being answered on the connection, or that it is closed."""
        self._idle.pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that has been idle for longest; returns whether there was one."""
        for connection in self._idle:
            self.works(connection)
            connection.transport.abort()
            return True
        return False


class _LimitedProtocol(asyncio.Protocol):
    """The methods that `limited` adds to uvicorn's protocol, whose attributes and methods it
    uses."""

    counted: Connections
    """The counter; not named `connections`, which is an attribute of uvicorn's."""
    head_seconds: float
    send_seconds: Callable[[], float]
    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    waiting: asyncio.TimerHandle | None = None
    """Timer that closes the connection unless a request begins before."""
    reading: asyncio.TimerHandle | None = None
    """Timer that aborts the connection unless the client reads before."""
    unread = 0
    """Bytes that the transport held unsent when `reading` began."""

    def connection_made(self, transport: Any) -> None:
        connections = self.counted
        connections.open += 1
        super().connection_made(transport)
        if connections.open > connections.most + SPARE and not connections.make_room():
            transport.abort()
            return
        connections.idles(self)
        notice_death(transport.get_extra_info("socket"))
        self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.counted.open -= 1
        self.counted.works(self)
        self.stop_waiting()
        self.stop_reading()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.counted.works(self)
            self.stop_waiting()
        elif self.waiting is None:
            self.await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if self.cycle.response_complete and not self.transport.is_closing():
            self.counted.idles(self)
        if self.counted.full:
            self.transport.close()

    def await_head(self) -> None:
        self.waiting = self.loop.call_later(self.head_seconds, self.transport.close)

    def stop_waiting(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_reading()

    def await_reader(self) -> None:
        self.unread = self.transport.get_write_buffer_size()
        self.reading = self.loop.call_later(self.send_seconds(), self.check_reader)

    def check_reader(self) -> None:
        if self.transport.get_write_buffer_size() > self.unread - LEAST_READ:
            self.transport.abort()
        else:
            self.await_reader()

    def stop_reading(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None


def limited(
    base: Any,
    connections: Connections,
    head_seconds: float = HEAD_SECONDS,
    send_seconds: Callable[[], float] = lambda: SEND_SECONDS,
) -> type[asyncio.Protocol]:
    """Add limits to uvicorn's protocol class `base`.

    Above the most connections, each is closed after its response; far above, those idle for longest
    are closed to make room for new ones, so that probes are answered while others hold connections
    open. uvicorn's own limit would answer probes with 503 as well, and its time-outs do not apply
    to clients that have sent half a request.

    From the moment that more is written than the transport takes (64 KiB beyond the kernel's
    buffer), the client has `send_seconds` to read the rest, or `LEAST_READ` of it, repeatedly;
    otherwise its connection is aborted, and its requests are withdrawn.
    """
    bounds = {
        "counted": connections,
        "head_seconds": head_seconds,
        "send_seconds": staticmethod(send_seconds),
    }
    return type("Limited", (_LimitedProtocol, base), bounds)


def notice_death(connection: Any) -> None:
    """Have the kernel end a connection whose peer vanishes without closing it."""
    idle, between = DEAD_SECONDS // 2, DEAD_SECONDS // 8
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): idle,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): between,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): (DEAD_SECONDS - idle) // between,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): DEAD_SECONDS * 1000,
    }
    with contextlib.suppress(OSError):  # it may be gone already
        for (level, option), value in options.items():
            connection.setsockopt(level, option, value)
