"""The state as a stream: what has changed, once a second."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.access.keys import ApiKeys
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import STRANGER
from tests.server.process import ServerProcess
from tests.server.test_api import MODEL


def test_the_first_event_has_all_and_later_ones_what_has_changed(echo: ServerProcess) -> None:
    with echo.http.stream("GET", "/admin/live") as response:
        lines = response.iter_lines()

        def following() -> dict[str, Any]:
            line = next(line for line in lines if line)
            found: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: "))
            return found

        assert response.headers["content-type"].startswith("text/event-stream")
        first = following()
        assert first["order"] == list(first["models"])
        assert MODEL in first["order"]
        assert {"ended", "decisions", "open"} <= first.keys()
        assert not first["state"]["models"]
        assert all(not device["models"] for device in first["state"]["devices"])
        later = following()
        while later["models"]:  # what another test has left behind settles
            later = following()
        assert not {"order", "ended", "decisions"} & later.keys()
        assert later["state"]["uptime"] > first["state"]["uptime"]
        name = {"x-request-id": "of-the-stream"}
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
        assert echo.http.post("/v1/completions", json=body, headers=name).status_code == 200
        while "ended" not in (later := following()):
            pass
        assert later["ended"][0]["request_id"] == "of-the-stream"
    samples = echo.http.get("/admin/history", params={"seconds": 240}).json()["samples"]
    assert samples[-1]["devices"][0]["total"] == first["state"]["total"]


def test_a_hundred_pages_do_not_follow_it_at_once(echo: ServerProcess) -> None:
    streams, statuses = [], []
    with httpx.Client(base_url=echo.base, limits=httpx.Limits(max_connections=None)) as client:
        for _ in range(34):
            streams.append(client.send(client.build_request("GET", "/admin/live"), stream=True))
            statuses.append(streams[-1].status_code)
        for stream in streams:
            stream.close()
    assert statuses[0] == 200
    assert statuses[-1] == 429


@pytest.mark.parametrize("path", ["/admin/live", "/admin/history"])
def test_who_may_follow_it(path: str) -> None:
    key = KeySettings(name="a", key="sk-a-of-the-tests", models=("m",))
    guard = ApiKeys(ServerSettings(keys=(key,), admin_key="sk-admin-of-the-tests"))
    guard.check(guard.caller(b"sk-admin-of-the-tests"), "GET", path)
    for caller in (STRANGER, guard.caller(b"sk-a-of-the-tests")):
        with pytest.raises(Fault):
            guard.check(caller, "GET", path)
    guard.replace(ServerSettings())
    guard.check(guard.caller(None), "GET", path)


def test_simulations_are_the_operators(echo: ServerProcess) -> None:
    """Without an admin key there are none."""
    for path in ("/admin/simulate", "/admin/plan", "/admin/story/play"):
        assert echo.http.post(path, json={}).status_code == 404
