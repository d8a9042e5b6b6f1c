"""Keys, quotas, bounds and request ids, as clients of a running server meet them."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ballast.dashboard.reader import Reader, Unreadable
from ballast.server.observe.server_state import ServerNow
from tests.cluster.fake_device import REFUSE, TELL
from tests.server.process import DEADLINE, ServerProcess, server, until
from tests.server.test_api import MODEL, sample

SECTION = """
server:
  keys:
    - {name: whole, key: sk-whole-of-the-tests}
    - {name: part, key: sk-part-of-the-tests, models: [wren-mini]}
    - {name: apart, key: sk-apart-of-the-tests, isolated: true}
    - {name: shared, key: sk-shared-of-the-tests, isolated: false}
    - {name: slow, key: sk-slow-of-the-tests, requests_per_minute: 2}
    - {name: short, key: sk-short-of-the-tests, tokens_per_minute: 20}
  admin_key: sk-admin-of-the-tests
  most_body: 64KiB
"""


KEYS = {
    "sk-whole-of-the-tests": "key:whole",
    "sk-apart-of-the-tests": "key:apart",
    "sk-shared-of-the-tests": "",
}
"""And what keeps their cached prefixes apart."""


@pytest.fixture(scope="module")
def guarded(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("guarded")
    shutil.copytree(fleet_file.parent, directory, dirs_exist_ok=True)
    file = directory / "fleet.yaml"
    file.write_text(file.read_text().rstrip() + "\n" + SECTION)
    with server(file, "--echo") as running:
        yield running
        assert "sk-" not in running.output


def ask(to: ServerProcess, key: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [40, 41, 42], "max_tokens": 2, **more}
    return to.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def message(response: httpx.Response) -> str:
    result: str = response.json()["error"]["message"]
    return result


def code(response: httpx.Response) -> str:
    result: str = response.json()["error"]["code"]
    return result


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/openapi.json", "/nowhere", "/admin/x"]
)
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer sk-wrong-of-the-tests"}, {"x-api-key": ""}]
)
def test_every_route_but_health_wants_a_key(
    guarded: ServerProcess, path: str, headers: dict[str, str]
) -> None:
    refused = guarded.http.get(path, headers=headers)
    assert (refused.status_code, code(refused)) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"


def test_probes_need_no_key_and_tell_strangers_nothing_of_models(guarded: ServerProcess) -> None:
    assert guarded.http.get("/live").json() == {"status": "live"}
    assert guarded.http.get("/health").json() == {"status": "ok"}


def test_a_key_opens_what_it_may(guarded: ServerProcess) -> None:
    assert ask(guarded, "sk-whole-of-the-tests").status_code == 200
    assert (
        guarded.http.get("/v1/models", headers={"x-api-key": "sk-whole-of-the-tests"}).status_code
        == 200
    )
    part = {"authorization": "Bearer sk-part-of-the-tests"}
    listed = guarded.http.get("/v1/models", headers=part).json()["data"]
    assert [m["id"] for m in listed] == ["wren-mini"]
    hidden = ask(guarded, "sk-part-of-the-tests")
    assert (hidden.status_code, code(hidden)) == (404, "model_not_found")
    assert message(hidden).endswith("; served: wren-mini")
    assert ask(guarded, "sk-part-of-the-tests", model="wren-mini").status_code == 200
    assert guarded.http.get("/metrics", headers=part).status_code == 403


def test_keys_share_no_prefixes_unless_they_say_so(guarded: ServerProcess) -> None:
    result = {key: json.loads(message(ask(guarded, key, seed=TELL))) for key in KEYS}
    assert {key: submission["salt"] for key, submission in result.items()} == KEYS


def test_the_admin_key_reads_and_administers_but_does_not_generate(
    guarded: ServerProcess,
) -> None:
    admin = {"authorization": "Bearer sk-admin-of-the-tests"}
    assert guarded.http.get("/metrics", headers=admin).status_code == 200
    assert guarded.http.get("/admin/nowhere", headers=admin).status_code == 404
    assert code(ask(guarded, "sk-admin-of-the-tests")) == "forbidden"
    other = guarded.http.get(
        "/admin/nowhere", headers={"authorization": "Bearer sk-whole-of-the-tests"}
    )
    assert other.status_code == 403


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, "wants a key"),
        ("sk-wrong-of-the-tests", "not accept"),
        ("sk-whole-of-the-tests", "not accept"),
    ],
)
def test_top_says_that_it_needs_the_admin_key(
    guarded: ServerProcess, key: str | None, why: str
) -> None:
    async def read(key: str | None) -> ServerNow:
        async with Reader(guarded.url, key) as reader:
            return await reader.read()

    with pytest.raises(Unreadable, match=why):
        asyncio.run(read(key))
    assert asyncio.run(read("sk-admin-of-the-tests")).status == "ok"


def test_without_an_admin_key_there_are_no_admin_routes(echo: ServerProcess) -> None:
    assert echo.http.post("/admin/models").status_code == 404


def test_requests_per_minute(guarded: ServerProcess) -> None:
    first, second = ask(guarded, "sk-slow-of-the-tests"), ask(guarded, "sk-slow-of-the-tests")
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    third = ask(guarded, "sk-slow-of-the-tests")
    assert (third.status_code, code(third)) == (429, "rate_limit_exceeded")
    assert 1 <= int(third.headers["retry-after"]) <= 30


def test_tokens_per_minute_count_prompts_and_outputs(guarded: ServerProcess) -> None:
    assert ask(guarded, "sk-short-of-the-tests", max_tokens=17).status_code == 200
    refused = ask(guarded, "sk-short-of-the-tests")
    assert (refused.status_code, code(refused)) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_a_full_queue_says_when_to_come_again(guarded: ServerProcess) -> None:
    refused = ask(guarded, "sk-whole-of-the-tests", seed=REFUSE)
    assert (refused.status_code, code(refused)) == (429, "queue_full")
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_a_long_body_is_refused_whether_announced_or_not(guarded: ServerProcess) -> None:
    key = {"authorization": "Bearer sk-whole-of-the-tests", "content-type": "application/json"}
    long = b'{"model": "' + b"x" * 100_000 + b'"}'
    announced = guarded.http.post("/v1/completions", content=long, headers=key)
    parts = iter([long[:50_000], long[50_000:]])
    chunked = guarded.http.post("/v1/completions", content=parts, headers=key)
    for refused in (announced, chunked):
        assert (refused.status_code, code(refused)) == (413, "body_too_large")


@pytest.mark.parametrize("result", ["mine-1", "a" * 128])
def test_a_request_id_comes_back(guarded: ServerProcess, result: str) -> None:
    for path in ("/live", "/v1/models"):
        answer = guarded.http.get(path, headers={"x-request-id": result})
        assert answer.headers["x-request-id"] == result


@pytest.mark.parametrize("result", ["", "a b", "a" * 129])
def test_a_request_id_that_is_none_is_replaced(guarded: ServerProcess, result: str) -> None:
    made = guarded.http.get("/live", headers={"x-request-id": result}).headers["x-request-id"]
    assert made.startswith("req-")


def test_a_stream_carries_its_id(echo: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "stream": True}
    with echo.http.stream(
        "POST", "/v1/completions", json=body, headers={"x-request-id": "s-1"}
    ) as stream:
        assert stream.headers["x-request-id"] == "s-1"
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_within_its_body_frees_its_place(
    fleet_file: Path, tmp_path: Path
) -> None:
    """Two requests may be open: two clients that have sent half a body have both places."""
    shutil.copytree(fleet_file.parent, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "fleet.yaml"
    file.write_text(file.read_text().rstrip() + "\nserver: {most_open: 2}\n")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
    head += b"content-type: application/json\r\ncontent-length: 9\r\n\r\n"
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    with server(file, "--echo") as running:
        url = httpx.URL(running.base)

        def post() -> int:
            return running.http.post("/v1/completions", json=body).status_code

        def begin() -> socket.socket:
            """A client that has a place, and sends no more of its body. The places of clients that
            have left become free one after the other."""
            end = time.monotonic() + DEADLINE
            while True:
                client = socket.create_connection((url.host, url.port))
                client.sendall(head)
                answer = client.recv(1000)
                if answer.startswith(b"HTTP/1.1 100 "):
                    client.sendall(b"{")
                    return client
                client.close()
                assert (answer[:12], time.monotonic() < end) == (b"HTTP/1.1 429", True)
                time.sleep(0.02)

        for _ in range(3):
            with begin(), begin():
                assert post() == 429
            end = time.monotonic() + DEADLINE
            while (status := post()) != 200:  # until the server has heard that they left
                assert (status, time.monotonic() < end) == (429, True)
                time.sleep(0.02)


def test_connections_are_counted(echo: ServerProcess) -> None:
    before = sample(echo, "ballast_open_connections")
    with socket.create_connection((httpx.URL(echo.base).host, httpx.URL(echo.base).port)):
        until(lambda: sample(echo, "ballast_open_connections") > before)
