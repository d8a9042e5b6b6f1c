"""Heads without end are refused, bodies of any cut are not; offers to upgrade are ignored; HTTP/1.0
gets no chunks; and C is not needed to serve."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from ballast.server.http.connection import HEAD_BYTES, protocol
from tests.server.process import DEADLINE, ServerProcess, server

START = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\n"
)
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
CUT = 1000


def answer(running: ServerProcess, parts: Iterable[bytes]) -> bytes:
    """What the server says until it closes the connection."""
    at = urlsplit(running.base)
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
    once = b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-long: %b\r\n" % (b"a" * (HEAD_BYTES // 2))
    said = answer(echo, [*[once + b"\r\n"] * 4, once + b"connection: close\r\n\r\n"])
    assert said.count(b"HTTP/1.1 200") == 5


def completion(running: ServerProcess, head: bytes, **more: object) -> tuple[bytes, bytes]:
    """A request's head, with its body's length, and the body."""
    model = running.http.get("/v1/models").json()["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "one two", "max_tokens": 2, **more}).encode()
    return head + b"content-length: %d\r\n\r\n" % len(body), body


@pytest.fixture(scope="module", params=["httptools", "h11"])
def any_echo(request: pytest.FixtureRequest, echo_file: Path) -> Iterator[ServerProcess]:
    """A server with either parser, whose models repeat the prompt."""
    if request.param == "httptools":
        yield request.getfixturevalue("echo")
        return
    with server(echo_file, "--echo", "--h11") as running:
        yield running


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nupgrade: h2c\r\n"
WEBSOCKET = (
    b"connection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: YQ==\r\nsec-websocket-version: 13\r\n"
)
LAST = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("parts", ["one", "heads apart", "bytes"])
def test_an_offer_to_upgrade_is_ignored(
    any_echo: ServerProcess, offer: bytes, chunked: bool, parts: str
) -> None:
    head, body = completion(any_echo, POST + offer)
    if chunked:
        head = POST + offer + b"transfer-encoding: chunked\r\n\r\n"
        body = chunk(body) + b"0\r\n\r\n"
    once = head + body
    cut = {
        "one": [once + once + LAST],
        "heads apart": [head, body + head, body + LAST],
        "bytes": [once[i : i + 1] for i in range(len(once))] + [once, LAST],
    }[parts]
    said = answer(any_echo, cut)
    assert said.count(b"HTTP/1.1 200") == 3
    assert said.count(b'"completion_tokens":2') == 2


def test_an_offer_may_come_before_its_body(any_echo: ServerProcess) -> None:
    head, body = completion(any_echo, START + H2C + b"expect: 100-continue\r\n")
    at = urlsplit(any_echo.base)
    with socket.create_connection((at.hostname, at.port or 80), timeout=DEADLINE) as client:
        client.sendall(head)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 100")  # the server has read the head
        client.sendall(body)
        said = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert said.startswith(b"HTTP/1.1 200")
    assert b'"completion_tokens":2' in said


def test_an_offer_may_come_with_a_wish_to_close(any_echo: ServerProcess) -> None:
    closing = H2C.replace(b"Upgrade,", b"close, Upgrade,")
    said = answer(any_echo, [b"".join(completion(any_echo, POST + closing)), LAST])
    assert said.count(b"HTTP/1.1 200") == 1
    assert b'"completion_tokens":2' in said


def test_a_head_with_an_offer_is_bounded(echo: ServerProcess) -> None:
    endless = [POST, H2C, *[b"x-many: %b\r\n" % (b"a" * CUT)] * (2 * HEAD_BYTES // CUT)]
    assert answer(echo, endless)[:12] in (b"HTTP/1.1 400", b"")
    fits = H2C + b"x-long: %b\r\n" % (b"a" * (HEAD_BYTES // 2))
    said = answer(echo, [*completion(echo, POST + fits), *completion(echo, POST + fits), LAST])
    assert said.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("offer", [b"", H2C], ids=["plain", "offer"])
def test_connect_is_refused(any_echo: ServerProcess, offer: bytes) -> None:
    said = answer(
        any_echo,
        [b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + offer + b"\r\n"],
    )
    assert said.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("offer", [b"", H2C], ids=["plain", "offer"])
def test_a_stream_for_http_1_0_has_no_chunks(any_echo: ServerProcess, offer: bytes) -> None:
    request = completion(any_echo, POST.replace(b"HTTP/1.1", b"HTTP/1.0") + offer, stream=True)
    head, body = answer(any_echo, [b"".join(request)]).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_whole_answer_for_http_1_0_has_its_length(any_echo: ServerProcess) -> None:
    request = completion(any_echo, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, body = answer(any_echo, [b"".join(request)]).split(b"\r\n\r\n", 1)
    assert b"content-length: %d" % len(body) in head.lower()
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_without_httptools_h11_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert protocol() is not H11Protocol
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    assert protocol() is H11Protocol
