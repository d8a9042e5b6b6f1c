"""One server, and clients and checkpoints that mean it harm: everybody else is served."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.fake_device import HOLD
from tests.server.process import DEADLINE, ServerProcess, server, until
from tests.server.text.test_chat_template import RANGES

MODEL = "atlas-chat"
FLOOD, OTHER, PART, RAISED, ADMIN = (
    "sk-flood-of-the-tests",
    "sk-other-of-the-tests",
    "sk-part-of-the-tests",
    "sk-raised-of-the-tests",
    "sk-admin-of-the-tests",
)
MOST_OPEN = 40
SECTION = f"""
server:
  keys:
    - {{name: flood, key: {FLOOD}}}
    - {{name: other, key: {OTHER}}}
    - {{name: part, key: {PART}, models: [wren-mini]}}
    - {{name: raised, key: {RAISED}, priority: 5, isolated: false}}
  admin_key: {ADMIN}
  most_open: {MOST_OPEN}
  drain_seconds: 5
"""
STALLED = 8


@pytest.fixture(scope="module")
def hostile(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server one of whose models has a chat template that never ends."""
    directory = tmp_path_factory.mktemp("hostile")
    shutil.copytree(fleet_file.parent, directory, dirs_exist_ok=True)
    shutil.copytree(directory / "wren-mini", directory / "endless")
    template = directory / "endless" / "chat_template.jinja"
    template.write_text(RANGES)
    file = directory / "fleet.yaml"
    text = file.read_text().rstrip() + "\n  - {name: endless, path: endless}\n"
    file.write_text(text + SECTION)
    with server(file, "--echo") as running:
        yield running
        running.signal()
        assert running.wait() == 0
        assert "Traceback" not in running.output


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(to: ServerProcess, key: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [40, 41], "max_tokens": 2, **fields}
    return to.http.post("/v1/completions", json=body, headers=headers(key))


def talk(to: ServerProcess, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    return to.http.post("/v1/chat/completions", json=body, headers=headers(OTHER))


def code(response: httpx.Response) -> str:
    found: str = response.json()["error"]["code"]
    return found


def stall(to: ServerProcess, path: str, sent: bytes = b"x" * 2000) -> socket.socket:
    """A connection that began a request and does not finish it."""
    url = httpx.URL(to.base)
    made = socket.create_connection((url.host, url.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {FLOOD}\r\n"
    made.sendall(head.encode() + b"content-length: 8000000\r\n\r\n" + sent)
    return made


# -- templates ----------------------------------------------------------------------------------


def test_a_template_without_end_costs_its_own_model_only(hostile: ServerProcess) -> None:
    refused = talk(hostile, "endless")
    assert (refused.status_code, code(refused)) == (400, "invalid_request")
    assert "/v1/completions" in refused.json()["error"]["message"]
    hostile.until_said("endless answers no conversations")
    assert talk(hostile, MODEL).status_code == 200
    assert ask(hostile, OTHER, model="endless").status_code == 200


def test_nor_when_an_operator_adds_it(hostile: ServerProcess) -> None:
    added = hostile.http.post(
        "/admin/models", json={"name": "later", "path": "endless"}, headers=headers(ADMIN)
    )
    assert added.status_code == 201, added.text
    assert talk(hostile, "later").status_code == 400
    assert talk(hostile, MODEL).status_code == 200


# -- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/live", "/health", "/v1/completions", "/nowhere", "/v1/models"])
def test_probes_are_answered_whoever_stalls(hostile: ServerProcess, path: str) -> None:
    stalled = [stall(hostile, path) for _ in range(STALLED)]
    try:
        for probe in ("/live", "/health"):
            for method in ("GET", "HEAD"):
                assert hostile.http.request(method, probe).status_code == 200
            assert hostile.http.post(probe, content=b"x" * 100).status_code == 405
        assert ask(hostile, OTHER).status_code == 200
    finally:
        for each in stalled:
            each.close()


def test_a_post_to_a_free_path_is_answered_before_its_body_comes(hostile: ServerProcess) -> None:
    with stall(hostile, "/live") as stalled:
        stalled.settimeout(DEADLINE)
        assert stalled.recv(100).startswith(b"HTTP/1.1 405")


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("chat/completions", {"messages": [{}] * 10**6}, 413),
        ("chat/completions", {"messages": [{}] * 10**4}, 400),
        ("completions", {"prompt": "hello wor " * 700_000}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 7 * 10**6}]}, 400),
        ("completions", {"prompt": [7] * 10**6}, 413),
        ("completions", {"prompt": [7] * 10**5}, 400),
        ("embeddings", {"input": ["a"] * 10**4}, 400),
        ("completions", {"prompt": "x" * (9 << 20)}, 413),
    ],
)
def test_what_is_too_much_is_refused(
    hostile: ServerProcess, route: str, body: dict[str, Any], status: int
) -> None:
    refused = hostile.http.post(
        f"/v1/{route}", json={"model": MODEL, **body}, headers=headers(FLOOD)
    )
    assert refused.status_code == status, refused.text[:300]


# -- keys ---------------------------------------------------------------------------------------


class Flood:
    """Requests of one key that do not end by themselves, as many at a time as it gets."""

    def __init__(self, to: ServerProcess, key: str, clients: int, **fields: Any) -> None:
        self._to, self._key, self._fields = to, key, fields
        self._over = threading.Event()
        self.statuses: list[int] = []
        self._threads = ThreadPoolExecutor(clients)
        self._done = [self._threads.submit(self._run) for _ in range(clients)]

    def _run(self) -> None:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 4, "seed": HOLD, "stream": True}
        with (
            httpx.Client(base_url=self._to.base, timeout=DEADLINE) as client,
            client.stream(
                "POST",
                "/v1/completions",
                json={**body, **self._fields},
                headers=headers(self._key),
            ) as response,
        ):
            self.statuses.append(response.status_code)
            if response.status_code == 200:
                chunks = response.iter_raw()  # kept: without it, the stream is closed
                next(chunks)
                self._over.wait(DEADLINE)

    def __enter__(self) -> Flood:
        until(lambda: len(self.statuses) == len(self._done))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for done in self._done:
            done.result(DEADLINE)
        self._threads.shutdown()


def quiet(to: ServerProcess) -> Callable[[], bool]:
    return lambda: to.http.get("/admin/state", headers=headers(ADMIN)).json()["open"] == 0


def test_a_flood_of_one_key_leaves_others_their_share(hostile: ServerProcess) -> None:
    """130 clients that ask for the highest priority get none of it; without, half of the places."""
    with Flood(hostile, FLOOD, 130, priority=-(2**31)) as flood:
        assert set(flood.statuses) == {403}
    with Flood(hostile, FLOOD, 130) as flood:
        assert flood.statuses.count(200) == MOST_OPEN // 2
        assert flood.statuses.count(429) == 130 - MOST_OPEN // 2
        assert [ask(hostile, OTHER).status_code for _ in range(9)] == [200] * 9
        assert ask(hostile, FLOOD).status_code == 429
    until(quiet(hostile))
    assert ask(hostile, FLOOD).status_code == 200


@pytest.mark.parametrize(
    ("key", "priority", "status"),
    [
        (OTHER, -1, 403),
        (OTHER, 0, 200),
        (OTHER, 2**31 - 1, 200),
        (RAISED, -5, 200),
        (RAISED, -6, 403),
    ],
)
def test_a_key_raises_its_priority_as_far_as_it_may(
    hostile: ServerProcess, key: str, priority: int, status: int
) -> None:
    answer = ask(hostile, key, priority=priority)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["param"] == "priority"


def test_a_restricted_key_sees_nothing_of_other_models(hostile: ServerProcess) -> None:
    for path in ("/admin/state", "/metrics", "/v1/models", "/health"):
        shown = hostile.http.get(path, headers=headers(PART))
        assert MODEL not in shown.text, path
        assert "endless" not in shown.text, path
    for path in ("/admin/state", "/metrics"):
        assert hostile.http.get(path, headers=headers(PART)).status_code == 403
    state = hostile.http.get("/admin/state", headers=headers(ADMIN)).json()
    assert MODEL in json.dumps(state)
