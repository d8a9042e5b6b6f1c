"""What a web page elsewhere can have a browser send, and what is refused of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from ballast.core.errors import ConfigError
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.http.origins import SameOrigin, check_origins
from tests.server.process import ServerProcess
from tests.server.test_api import MODEL

KEYS = (KeySettings(name="a", key="sk-a-of-the-tests"),)
PAGE = "https://chat.example"


def status(
    *headers: tuple[str, str], method: str = "POST", version: str = "1.1", **settings: Any
) -> int:
    """Status of a request with these headers, through the middleware alone."""
    found: list[int] = []
    scope = {
        "type": "http",
        "method": method,
        "path": "/v1/completions",
        "http_version": version,
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }

    async def send(message: Any) -> None:
        found.append(message.get("status", 0))

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    app = SameOrigin(Response("in"), lambda: ServerSettings(**settings), ("box.lan", "::1"))
    asyncio.run(app(scope, receive, send))
    return found[0]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.:8000", 200),
        ("app.localhost", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("[FE80::1]:1", 200),
        ("192.0.2.7:80", 200),
        ("localhost:", 200),
        ("Box.LAN:8000", 200),
        ("named.example.:8000", 200),
        ("NAMED.example", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1.nip.io", 421),
        ("evillocalhost", 421),
        ("xnamed.example", 421),
        ("2130706433", 421),
        ("localhost..", 421),
        ("::1", 400),
        ("[::1", 400),
        ("[localhost]", 400),
        ("localhost@evil.example", 400),
        ("localhost:8000:80", 400),
        ("localhost/evil", 400),
        ("localhost evil.example", 400),
        ("", 400),
    ],
)
def test_a_host_without_keys(host: str, expected: int) -> None:
    named: dict[str, Any] = {"hosts": ("named.example",)}
    for method in ("GET", "POST", "OPTIONS"):
        assert status(("host", host), method=method, **named) == expected
    assert status(("host", host), **named, keys=KEYS) == expected  # named hosts are the only ones
    assert status(("host", host), keys=KEYS) == (400 if expected == 400 else 200)


def test_a_host_is_sent_once() -> None:
    assert status() == 400
    assert status(version="1.0") == 200
    assert status(("host", "localhost"), ("host", "evil.example")) == 400


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("LocalHost:8000", "http://localhost:8000", 200),
        ("localhost", "http://localhost:80", 200),
        ("127.0.0.1:443", "https://127.0.0.1", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("localhost:8000", PAGE, 200),
        ("localhost:8000", PAGE.upper(), 200),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://127.0.0.1:8000", 403),
        ("localhost", "https://evil.example", 403),
        ("localhost", f"{PAGE}.evil.example", 403),
        ("localhost", f"{PAGE}:8443", 403),
        ("localhost", "null", 403),
        ("localhost", "", 403),
        ("localhost", "file://localhost", 403),
        ("localhost", "http://evil.example@localhost", 403),
        ("localhost", "http://[", 403),
    ],
)
@pytest.mark.parametrize("keys", [(), KEYS], ids=["no keys", "keys"])
def test_an_origin(host: str, origin: str, expected: int, keys: Any) -> None:
    more = {"cors_origins": (PAGE,), "keys": keys}
    for method in ("POST", "PATCH", "PUT", "DELETE", "post", "BREW"):
        sent = (("host", host), ("origin", origin))
        assert status(*sent, method=method, **more) == expected
    assert status(("host", host), ("origin", origin), method="GET", **more) == 200
    assert status(("host", host), **more) == 200


def test_one_of_two_origins_is_foreign() -> None:
    sent = (
        ("host", "localhost"),
        ("origin", "http://localhost"),
        ("origin", "http://evil.example"),
    )
    assert status(*sent) == 403


def test_any_origin_wants_keys() -> None:
    sent = (("host", "localhost"), ("origin", "https://any.example"))
    assert status(*sent, cors_origins=("*",), keys=KEYS) == 200
    assert status(*sent, cors_origins=("*",)) == 403
    check_origins(ServerSettings(cors_origins=("*",), keys=KEYS))
    check_origins(ServerSettings(cors_origins=(PAGE,)))
    with pytest.raises(ConfigError, match="cors_origins"):
        check_origins(ServerSettings(cors_origins=("*",), admin_key="sk-admin-of-the-tests"))


# -- of a server ----------------------------------------------------------------------------------

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("path", ["/admin/state", "/live", "/v1/models", "/nowhere", "/metrics"])
def test_no_route_answers_a_rebound_name(echo: ServerProcess, path: str) -> None:
    refused = echo.http.get(path, headers={"host": "evil.example:8000"})
    assert refused.status_code == 421
    error = refused.json()["error"]
    assert error["code"] == "unknown_host"
    assert "server.hosts" in error["message"]
    assert "x-request-id" in refused.headers


def test_a_page_elsewhere_generates_nothing(echo: ServerProcess) -> None:
    page = {"origin": "https://evil.example"}
    for headers in ({**page, "host": "evil.example"}, page, {"origin": "null"}):
        refused = echo.http.post("/v1/completions", json=BODY, headers=headers)
        assert refused.status_code in (403, 421)
        assert "access-control-allow-origin" not in refused.headers
    own = {"origin": echo.base}
    assert echo.http.post("/v1/completions", json=BODY, headers=own).status_code == 200
    messages = {**BODY, "messages": [{"role": "user", "content": "a"}]}
    refused = echo.http.post("/v1/messages", json=messages, headers=page)
    assert refused.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 400),
        ("text/json", 400),
        ("application/jsonx", 400),
        ("application/x-www-form-urlencoded", 400),
        ("text/plain; application/json", 400),
        ("multipart/form-data; boundary=application/json", 400),
        (None, 400),
    ],
)
def test_bodies_are_json_by_their_type(
    echo: ServerProcess, kind: str | None, expected: int
) -> None:
    body = httpx.Request("POST", "http://x", json=BODY).content
    headers = {} if kind is None else {"content-type": kind}
    answer = echo.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == expected, answer.text
