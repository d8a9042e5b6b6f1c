"""A client that costs little: requests prepared beforehand, sockets, and no JSON but the end's.

On two cores client, server and worker compete; what the client spends is not the server's fault.
"""

from __future__ import annotations

import json
import select
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_CHUNK = 1 << 16
_END = b"0\r\n\r\n"
"""Of a chunked body."""


@dataclass(slots=True)
class Stream:
    """One answer. Times are seconds of `time.perf_counter`."""

    sent: float
    received: bytearray = field(default_factory=bytearray)
    times: list[float] = field(default_factory=list)
    """When something came after the headers."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """Decoded; without `[DONE]`."""
        lines = bytes(self.received).split(b"\r\n\r\n", 1)[1].split(b"\n")
        found = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
        return [json.loads(data) for data in found if data != b"[DONE]"]

    @property
    def output_tokens(self) -> int:
        """By the usage that it ends with. Raises ValueError where it does not end well."""
        end = self.received[-600:].decode(errors="replace")
        if "data: [DONE]" not in end or '"completion_tokens":' not in end:
            raise ValueError(f"the stream ends with {end[-200:]!r}")
        return int(end.rsplit('"completion_tokens":', 1)[1].split(",")[0])


class Connections:
    """Kept-alive connections to one server, each for one stream at a time. A context manager."""

    def __init__(self, url: str, n: int) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._host, self._address = address.netloc, (address.hostname, address.port or 80)
        self._sockets = [self._connect() for _ in range(n)]

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()

    def streams(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Stream]:
        """All of them at once, one on each connection; returns when all have ended."""
        requests = [self._request(path, body) for body in bodies]
        self._reconnect()
        made = []
        with selectors.DefaultSelector() as ready:
            for connection, request in zip(self._sockets, requests, strict=False):
                made.append(Stream(time.perf_counter()))
                connection.sendall(request)
                ready.register(connection, selectors.EVENT_READ, made[-1])
            assert len(made) == len(bodies), "more streams than connections"
            left = len(made)
            while left:
                for key, _ in ready.select():
                    assert isinstance(key.fileobj, socket.socket)
                    left -= _read(key.fileobj, key.data, ready)
        return made

    def _connect(self) -> socket.socket:
        made = socket.create_connection(self._address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _reconnect(self) -> None:
        """Replace what the server has closed for being idle: only then is there something."""
        for i, each in enumerate(self._sockets):
            if select.select([each], [], [], 0)[0]:
                each.close()
                self._sockets[i] = self._connect()

    def _request(self, path: str, body: Mapping[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


def _read(connection: socket.socket, stream: Stream, ready: selectors.BaseSelector) -> bool:
    """Take what is there; whether that was the end."""
    data = connection.recv(_CHUNK)
    headers_over = bool(stream.times) or b"data: " in data
    stream.received += data
    if headers_over:
        stream.times.append(time.perf_counter())
    if data and not stream.received.endswith(_END):
        return False
    ready.unregister(connection)
    return True
