"""Heads without end are refused, bodies of any cut are not, and C is not needed to serve."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterable
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from ballast.server.http.connection import HEAD_BYTES, protocol
from tests.server.process import DEADLINE, ServerProcess

START = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    b"content-type: application/json\r\n"
)
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
CUT = 1000


def answer(server: ServerProcess, parts: Iterable[bytes]) -> bytes:
    """What the server says until it closes the connection."""
    at = urlsplit(server.base)
    assert at.hostname is not None
    with socket.create_connection((at.hostname, at.port or 80), timeout=DEADLINE) as client:
        try:
            for part in parts:
                client.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it need not listen to the end
        said = b""
        try:
            while data := client.recv(1 << 16):
                said += data
        except ConnectionResetError:
            pass
    return said


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


@pytest.mark.parametrize(
    "parts",
    [
        [START, b"x-long: ", *[b"a" * CUT] * (2 * HEAD_BYTES // CUT)],
        [START, *[b"x-many: %b\r\n" % (b"a" * CUT)] * (2 * HEAD_BYTES // CUT)],
        [b"GET /", *[b"a" * CUT] * (2 * HEAD_BYTES // CUT)],
        [CHUNKED, b"0\r\n", *[b"x-trailing: %b\r\n" % (b"a" * CUT)] * (5 * HEAD_BYTES // CUT)],
        [CHUNKED, b"1", *[b";a=%b" % (b"a" * CUT)] * (5 * HEAD_BYTES // CUT)],
    ],
    ids=["header", "headers", "path", "trailers", "extension"],
)
def test_a_head_without_end_is_refused(echo: ServerProcess, parts: list[bytes]) -> None:
    assert answer(echo, parts)[:12] in (b"HTTP/1.1 400", b"")  # it may be lost by the reset
    assert echo.http.get("/health").status_code == 200


def test_a_body_may_come_in_any_pieces(echo: ServerProcess) -> None:
    model = echo.http.get("/v1/models").json()["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "one two", "max_tokens": 2}).encode()
    body += b" " * (3 * HEAD_BYTES)
    single = (chunk(body[i : i + 1], b";at=%d" % i) for i in range(2 * HEAD_BYTES))
    rest = [chunk(body[2 * HEAD_BYTES :]), b"0\r\nx-trailing: a\r\n\r\n"]
    said = answer(echo, [CHUNKED, b"".join(single), *rest])
    assert said.startswith(b"HTTP/1.1 200")
    assert b'"completion_tokens":2' in said


def test_requests_one_after_the_other_do_not_add_up(echo: ServerProcess) -> None:
    once = b"GET /live HTTP/1.1\r\nhost: a\r\nx-long: %b\r\n" % (b"a" * (HEAD_BYTES // 2))
    said = answer(echo, [*[once + b"\r\n"] * 4, once + b"connection: close\r\n\r\n"])
    assert said.count(b"HTTP/1.1 200") == 5


def test_without_httptools_h11_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert protocol() is not H11Protocol
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    assert protocol() is H11Protocol
