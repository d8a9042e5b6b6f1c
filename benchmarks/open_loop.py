"""A client that sends requests when they are due, whatever becomes of the others.

One thread, prepared requests, kept-alive connections that are used again: at ten times what a
server can do, the client must not be what gives way.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_CHUNK = 1 << 16


@dataclass(slots=True)
class Exchange:
    """One streamed request. Times are seconds of `time.perf_counter`."""

    due: float
    sent: float = 0.0
    first: float | None = None
    """When its first event came."""
    ended: float | None = None
    status: int | None = None
    """None: the connection ended before there was one."""
    retry_after: str | None = None
    complete: bool = False
    """It ended with `[DONE]`, and without an error."""
    _received: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes, now: float) -> bool:
        """Some of the response; whether that was the end."""
        self._received += data
        if self.first is None and b"data: " in self._received:
            self.first = now
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return False
        if self.status is None:
            self._read_head(bytes(head))
        length = _header(bytes(head), b"content-length")
        over = body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length)
        if over:
            self.ended = now
            self.complete = b"data: [DONE]" in body[-200:] and b'"error":' not in body[-1000:]
            self._received = bytearray()
        return over

    def _read_head(self, head: bytes) -> None:
        self.status = int(head.split(b" ", 2)[1])
        result = _header(head, b"retry-after")
        self.retry_after = None if result is None else result.decode()


class OpenLoop:
    """Sends copies of one request to a server. A context manager."""

    def __init__(self, url: str, path: str, body: Mapping[str, Any], most: int) -> None:
        """`most`: connections. What is due while all are in use is sent late."""
        address = urlsplit(url)
        assert address.hostname is not None
        self._address = (address.hostname, address.port or 80)
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        self._request = head.encode() + content
        self._most = most
        self._idle: list[socket.socket] = []
        self._ready = selectors.DefaultSelector()
        self._busy = 0

    def __enter__(self) -> OpenLoop:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._ready.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._ready.close()

    def at_rate(self, per_second: float, seconds: float) -> list[Exchange]:
        """Evenly spaced; returns when all have ended."""
        began = time.perf_counter()
        due = [began + i / per_second for i in range(max(1, round(per_second * seconds)))]
        return self._run(deque(map(Exchange, due)), lambda: None)

    def closed(self, streams: int, seconds: float) -> list[Exchange]:
        """So many at a time, each followed by another until time is up."""
        end = time.perf_counter() + seconds

        def another() -> Exchange | None:
            now = time.perf_counter()
            return Exchange(now) if now < end else None

        now = time.perf_counter()
        return self._run(deque(Exchange(now) for _ in range(streams)), another)

    def _run(
        self, waiting: deque[Exchange], another: Callable[[], Exchange | None]
    ) -> list[Exchange]:
        made = list(waiting)
        while waiting or self._busy:
            now = time.perf_counter()
            while waiting and waiting[0].due <= now and self._busy < self._most:
                self._send(waiting.popleft(), now)
            pause = None
            if waiting and self._busy < self._most:
                pause = max(0.0, waiting[0].due - time.perf_counter())
            for key, _ in self._ready.select(pause):
                if self._read(key) and (following := another()) is not None:
                    made.append(following)
                    waiting.append(following)
        return made

    def _send(self, exchange: Exchange, now: float) -> None:
        exchange.sent = now
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = socket.create_connection(self._address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ready.register(connection, selectors.EVENT_READ)
        self._ready.modify(connection, selectors.EVENT_READ, exchange)
        self._busy += 1
        connection.sendall(self._request)

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Take what is there; whether an exchange has ended."""
        connection, exchange = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            data = connection.recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        over = bool(data) and exchange is not None and exchange.take(data, time.perf_counter())
        if data and not over:
            return False
        closing = not data or b"connection: close" in data.partition(b"\r\n\r\n")[0]
        if closing:
            self._ready.unregister(connection)
            connection.close()
            if connection in self._idle:
                self._idle.remove(connection)
        else:
            self._ready.modify(connection, selectors.EVENT_READ, None)
            self._idle.append(connection)
        if exchange is None:
            return False
        self._busy -= 1
        return True


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
