"""Clients that stop reading, and clients that are gone at any moment, before real models."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.server.process import DEADLINE, ServerProcess, until
from tests.server.test_api import MODEL
from tests.server.test_fuzz import check_unharmed

LONG, CHOICES = 400, 16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes `close` a reset instead of an end."""


def dial(running: ServerProcess) -> socket.socket:
    url = httpx.URL(running.base)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(DEADLINE)
    client.connect((url.host, url.port))
    return client


def request(**more: Any) -> bytes:
    asked = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": LONG, "ignore_eos": True, **more}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def reports(running: ServerProcess) -> list[dict[str, Any]]:
    state = running.http.get("/admin/state").json()
    return [model["report"] for model in state["models"]]


def working(running: ServerProcess) -> int:
    return sum(report["running"] + report["waiting"] for report in reports(running))


def paused(running: ServerProcess) -> int:
    return sum(report["paused"] for report in reports(running))


def test_a_reader_that_stops_is_paused_holds_nobody_up_and_misses_nothing(
    real: ServerProcess,
) -> None:
    worker = real.worker_pid
    asked = {"n": CHOICES, "seed": 5, "logprobs": 20}
    with closing(dial(real)) as slow:
        slow.sendall(request(stream=True, **asked))
        received = slow.recv(1024)
        assert received.startswith(b"HTTP/1.1 200")
        # Megabytes are to come. Nobody reads them: the server holds no more than its bound.
        until(lambda: paused(real) > 0 and working(real) == 0)
        undisturbed = real.http.post(
            "/v1/completions",
            content=request(**asked).split(b"\r\n\r\n")[1],
            headers={"content-type": "application/json"},
        ).json()
        assert paused(real) > 0
        parts = [received]
        while part := slow.recv(1 << 16):
            parts.append(part)
    text = b"".join(parts).decode()
    assert len(text) > 4_000_000
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    said = dict.fromkeys(range(CHOICES), "")
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            said[choice["index"]] += choice["text"]
    assert list(said.values()) == [choice["text"] for choice in undisturbed["choices"]]
    check_unharmed(real, worker)
    until(lambda: paused(real) == 0)


@pytest.mark.parametrize("how", ["ends", "resets"])
def test_clients_that_vanish_leave_nothing_behind(real: ServerProcess, how: str) -> None:
    worker = real.worker_pid
    long_prompt = {"prompt": [[i + 1, *range(10, 100)] for i in range(8)], "max_tokens": 100}
    whole, streamed, prefill = request(n=8), request(n=8, stream=True), request(**long_prompt)
    moments = [
        b"",
        b"POST /v1/comp",
        whole[:60],  # within the head
        whole[:-20],  # within the body
        *[prefill] * 6,  # before the prompts are read, most of them queued
        *[whole] * 6,
        *[streamed] * 3,
    ]
    clients = [dial(real) for _ in moments]
    for client, sent in zip(clients, moments, strict=True):
        client.sendall(sent)
    begun = [dial(real) for _ in range(3)]
    for client in begun:
        client.sendall(streamed)
    for client in begun:
        answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200"), answer
    for client in (*clients, *begun):
        if how == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()
    check_unharmed(real, worker)


def test_what_is_no_http_is_refused(real: ServerProcess) -> None:
    worker = real.worker_pid
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # TLS
        b"\r\n" * 400 + b"\x00" * 400,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    ):
        with closing(dial(real)) as client:
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            try:
                answer = b"".join(iter(lambda c=client: c.recv(4096), b""))
            except ConnectionResetError:
                continue
            assert not answer or answer.split(b" ")[1].startswith(b"4"), (garbage, answer)
    check_unharmed(real, worker)
