"""A client that does not read its stream: its requests are paused, and others go on."""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from typing import Any
from urllib.parse import urlsplit

from tests.server.process import DEADLINE, ServerProcess

CHOICES, TOKENS = 24, 200
"""Some 6 MB as JSON with their alternatives: more than the kernel holds for a client."""
ASKED = {
    "model": "wren-mini",
    "prompt": "The cat sat",
    "max_tokens": TOKENS,
    "n": CHOICES,
    "temperature": 1.0,
    "seed": 5,
    "stream": True,
    "logprobs": 20,
    "ignore_eos": True,
}


class SlowReader:
    """A client that sends its request and reads when it is told to."""

    def __init__(self, server: ServerProcess) -> None:
        at = urlsplit(server.url)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(DEADLINE)
        self._socket.connect((at.hostname, at.port))
        body = json.dumps(ASKED).encode()
        head = (
            "POST /v1/completions HTTP/1.1",
            "host: x",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "\r\n",
        )
        self._socket.sendall("\r\n".join(head).encode() + body)

    def read(self) -> dict[int, list[str]]:
        """All of it: by choice, its tokens."""
        # A larger window, now that it reads.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        told = b"".join(iter(lambda: self._socket.recv(1 << 20), b""))
        head, _, body = told.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0]
        found: dict[int, list[str]] = defaultdict(list)
        events = [e.removeprefix(b"data: ") for e in unchunked(body).split(b"\n\n") if e]
        assert events[-1] == b"[DONE]"
        for event in events[:-1]:
            if event.startswith(b":"):
                continue
            for choice in json.loads(event)["choices"]:
                found[choice["index"]] += choice["logprobs"]["tokens"]
        return found

    def close(self) -> None:
        self._socket.close()


def unchunked(body: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def paused(server: ServerProcess) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    name = "ballast:requests_paused{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_who_does_not_read_waits_and_has_the_same_answer(real: ServerProcess) -> None:
    asked: Any = {**ASKED, "stream": False, "logprobs": 0}
    whole = real.http.post("/v1/completions", json=asked).json()
    expected = {choice["index"]: choice["logprobs"]["tokens"] for choice in whole["choices"]}
    assert {len(tokens) for tokens in expected.values()} == {TOKENS}
    reader = SlowReader(real)
    give_up = time.monotonic() + DEADLINE
    while paused(real) == 0:
        assert time.monotonic() < give_up, "nothing was paused"
    answer = real.client.completions.create(model="wren-mini", prompt="A dog", max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert reader.read() == expected
    reader.close()
    while paused(real) > 0:  # as the report says, a tenth of a second later
        assert time.monotonic() < give_up, "something is still paused"
