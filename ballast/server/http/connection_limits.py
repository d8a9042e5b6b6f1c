"""Limit the number of client connections, and how long one may send or read nothing.

`limited` adds the limits to uvicorn's protocol class; `Connections` counts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from ballast.server.http.file_limit import OTHER_FILES, SPARE, raise_file_limit
from ballast.server.http.request_context import was_admitted
from ballast.transport.dead_peers import notice_death

HEAD_SECONDS = 20.0
"""Seconds for the head of a request, from its first byte; for the first request, from the
connection's start."""
SEND_SECONDS = 60.0
"""Seconds in which a client must read `LEAST_READ` of the data written to it, or all of it."""
LEAST_READ = 16 << 10
"""Bytes that a client must read in `SEND_SECONDS`."""
STRANGER_SECONDS = 5.0
"""Seconds that a stranger's request may take where there is no room: it is refused, or answered
as a probe, in milliseconds."""


class Connections:
    """Counts open connections, in all and by client address, and decides which make room.

    First go those of strangers, of which no request has been admitted yet: idle ones, longest idle
    first, and then those that take long over a response that strangers get at once. Last go idle
    ones of admitted clients. A connection on which an admitted request is answered stays.
    """

    def __init__(
        self,
        most: Callable[[], int],
        other_files: Callable[[], int] = lambda: OTHER_FILES,
        most_each: Callable[[], int | None] | None = None,
    ) -> None:
        """`most`: bound set by the operator; `other_files`: number of open files that are no
        connections; `most_each`: bound of the connections of one address, None for half of all;
        by default there is none."""
        self._most, self._other_files, self._most_each = most, other_files, most_each
        self._files = raise_file_limit()
        self._addresses: dict[Any, str] = {}
        """Addresses of all open connections."""
        self._of: Counter[str] = Counter()
        """Number of open connections, by address."""
        self._strangers: dict[Any, None] = {}
        """Idle connections of strangers, longest idle first."""
        self._admitted: dict[Any, None] = {}
        """Idle connections of admitted clients, longest idle first."""
        self._working: dict[Any, float] = {}
        """Connections on which a request is being answered, and since when, but for some that are
        known to be an admitted client's."""

    @property
    def open(self) -> int:
        return len(self._addresses)

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
        return len(self._strangers) + len(self._admitted)

    @property
    def _each(self) -> int:
        """Most connections of one address."""
        if self._most_each is None:
            return sys.maxsize
        each = self._most_each()
        return max(1, self.most // 2) if each is None else each

    def crowded(self) -> bool:
        """Whether there are too many connections for an admitted request, even after another one
        has made room for it."""
        return self.full and not self.make_room()

    def begins(self, connection: Any, address: str) -> bool:
        """Count a new connection; returns whether there is room for it, or another has made it."""
        self._addresses[connection] = address
        self._of[address] += 1
        if self._of[address] > self._each:
            return self._make_room_at(address)
        return self.open <= self.most + SPARE or self.make_room()

    def ends(self, connection: Any) -> None:
        """Record that a connection is closed, or about to be."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]
        self._forget(connection)

    def idles(self, connection: Any) -> None:
        """Record that no request is being answered on the connection from now on."""
        self._forget(connection)
        (self._admitted if connection.admitted else self._strangers)[connection] = None

    def works(self, connection: Any) -> None:
        """Record that a request is being answered on the connection, if it was idle."""
        if connection in self._strangers or connection in self._admitted:
            self._forget(connection)
            self._working[connection] = connection.loop.time()

    def make_room(self) -> bool:
        """Close the connection that is to make room; returns whether there was one."""
        going = next(iter(self._strangers), None) or self._slow_stranger()
        return self._close(going or next(iter(self._admitted), None))

    def _make_room_at(self, address: str) -> bool:
        """Close an idle connection of an address; returns whether there was one."""
        idle = (c for cs in (self._strangers, self._admitted) for c in cs)
        return self._close(next((c for c in idle if self._addresses[c] == address), None))

    def _slow_stranger(self) -> Any:
        """Find a connection on which a stranger's request is being answered for too long."""
        for connection, since in [*self._working.items()]:
            if connection.loop.time() - since < STRANGER_SECONDS:
                return None
            if not connection.admitted:
                return connection
            del self._working[connection]  # is not to be looked at again
        return None

    def _close(self, connection: Any) -> bool:
        if connection is None:
            return False
        self.ends(connection)
        connection.transport.abort()
        return True

    def _forget(self, connection: Any) -> None:
        for known in (self._strangers, self._admitted, self._working):
            known.pop(connection, None)


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
    was_admitted = False

    @property
    def admitted(self) -> bool:
        """Whether a request has been admitted on the connection."""
        if not self.was_admitted and self.cycle is not None:
            self.was_admitted = was_admitted(self.cycle.scope)
        return self.was_admitted

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self.counted.begins(self, client_address(transport)):
            self.counted.ends(self)
            transport.abort()
            return
        self.counted.idles(self)
        if (connection := transport.get_extra_info("socket")) is not None:  # else it is a relay's
            notice_death(connection)
        self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.counted.ends(self)
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


def client_address(transport: Any) -> str:
    """Address of the peer, for counting: of IPv6 the network of 64 bits that one client has to
    itself; empty where there is none."""
    peer = transport.get_extra_info("peername")
    host = str(peer[0]).partition("%")[0] if isinstance(peer, tuple) and peer else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)
