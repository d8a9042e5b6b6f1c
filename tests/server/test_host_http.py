"""A server whose hosts answer HTTP: keys and quotas are its own, whichever host is asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.fake_device import HOLD
from tests.cluster.hosts.http_hosts import ADDRESSES
from tests.server.process import DEADLINE, ServerProcess, server

KEY = "a-key-of-one-request-at-a-time"


@pytest.fixture
def hosts(fleet_file: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """URLs of two hosts' own addresses; the server's own is another one."""
    file = tmp_path / "fleet.yaml"
    text = fleet_file.read_text().replace("path: ", f"path: {fleet_file.parent}/")
    assert "\nserver:" not in text
    file.write_text(f"{text}\nserver:\n  keys:\n    - {{name: k, key: {KEY}, concurrent: 1}}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    with server(file, "--echo", "--hosts-http", str(port)) as running:
        urls = {node: f"http://{ip}:{port}" for node, ip in ADDRESSES.items()}
        for url in urls.values():
            until_it_answers(url, running)
        yield urls


def until_it_answers(url: str, running: ServerProcess) -> None:
    end = time.monotonic() + DEADLINE
    while True:
        try:
            if httpx.get(f"{url}/live", timeout=DEADLINE).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, "".join(running.lines)
        time.sleep(0.05)


def test_keys_and_quotas_hold_on_all_hosts(hosts: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(timeout=DEADLINE) as client:
        for url in hosts.values():
            assert client.get(f"{url}/v1/models").status_code == 401
        models = [client.get(f"{url}/v1/models", headers=headers).json() for url in hosts.values()]
        assert models[0] == models[1]
        name = models[0]["data"][0]["id"]
        plain = {"model": name, "prompt": "a b c", "max_tokens": 3}
        asked = [
            client.post(f"{url}/v1/completions", json=plain, headers=headers).json()
            for url in hosts.values()
        ]
        assert asked[0]["choices"] == asked[1]["choices"]
        held = {**plain, "stream": True, "seed": HOLD}
        x, y = (f"{url}/v1/completions" for url in hosts.values())
        with client.stream("POST", x, json=held, headers=headers) as stream:
            lines = stream.iter_lines()  # once it is gone, so is the connection
            assert next(lines).startswith("data:")
            assert client.post(y, json=plain, headers=headers).status_code == 429
        # Its client has left: the server is told, and another request may run.
        end = time.monotonic() + DEADLINE
        while client.post(y, json=plain, headers=headers).status_code == 429:
            assert time.monotonic() < end
            time.sleep(0.05)
