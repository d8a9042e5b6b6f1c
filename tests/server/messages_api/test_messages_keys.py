"""What refuses a request of the Messages API before its route speaks that API too."""

from __future__ import annotations

import json

import anyio
import httpx
import pytest
from starlette.responses import Response

from ballast.core.clock import VirtualClock
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.access.keys import ApiKeys, Guard
from ballast.server.observe.request_watch import Watch
from tests.server.observe.test_metrics import Scraped

KEYS = ApiKeys(ServerSettings(keys=(KeySettings(name="one", key="sk-one-of-the-tests"),)))


def post(path: str, **headers: str) -> httpx.Response:
    guarded = Guard(Response("in"), KEYS)
    watched = Watch(guarded, Scraped().metrics, VirtualClock(0.0))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(watched)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, headers=headers)

    return anyio.run(ask)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_key_is_taken_from_either_header(path: str) -> None:
    for headers in (
        {"x-api-key": "sk-one-of-the-tests"},
        {"authorization": "Bearer sk-one-of-the-tests"},
    ):
        let_in = post(path, **headers)
        assert let_in.text == "in"
        assert let_in.headers["request-id"] == let_in.headers["x-request-id"]
    refused = post(path, **{"x-api-key": "sk-two-of-the-tests"})
    assert refused.status_code == 401
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    assert "x-api-key" in body["error"]["message"]
    assert body["request_id"] == refused.headers["request-id"]


def test_other_routes_keep_the_envelope_of_openai() -> None:
    refused = post("/v1/messages_of_others")
    assert json.loads(refused.text)["error"]["code"] == "invalid_api_key"
    assert "request-id" not in refused.headers
