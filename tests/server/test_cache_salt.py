"""Requests with different `cache_salt`s share no cached prefix, and fields that say who shares
what are never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ballast.core.settings import KeySettings
from ballast.server.http.refused_fields import REFUSED
from ballast.server.http.request_context import Caller
from tests.cluster.fake_device import TELL
from tests.server.process import ServerProcess
from tests.server.test_api import MODEL

LONG = "One of the many users of this key asks for something that nobody else may know of. " * 3
TURNS = [{"role": "user", "content": LONG}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 1},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/responses": {"input": LONG, "max_output_tokens": 1},
}


def cached(to: ServerProcess, path: str, **fields: Any) -> int:
    """Tokens of the prompt that came from the prefix cache."""
    answer = to.http.post(path, json={"model": MODEL, **BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        found: int = usage["cache_read_input_tokens"]
    elif path == "/v1/responses":
        found = usage["input_tokens_details"]["cached_tokens"]
    else:
        found = usage["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("path", BODIES)
def test_salts_share_no_prefix(real: ServerProcess, path: str) -> None:
    first, second = f"user-1{path}", f"user-2{path}"
    cached(real, path)
    assert cached(real, path) > 0
    assert cached(real, path, cache_salt=first) == 0
    own = cached(real, path, cache_salt=first)
    assert own > 0
    assert cached(real, path, cache_salt=second) == 0
    assert cached(real, path, cache_salt=first) == own


def test_a_salt_is_of_its_key() -> None:
    """No key can write a salt that is another's."""
    keys = [None, *(KeySettings(name=name, key="k" * 16) for name in ("a", "b", "a:b"))]
    callers = [Caller(key, apart=apart) for key in keys for apart in (False, True)]
    salts = [None, "a", "b", "key:a", "\0a", "a\0", "key:a\0b", "\0"]
    made = {(caller.salt, salt): caller.salted(salt) for caller in callers for salt in salts}
    assert len(set(made.values())) == len(made)


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
def test_the_salt_reaches_the_device(echo: ServerProcess, path: str) -> None:
    body = {"model": MODEL, **BODIES.get(path, {"input": "a"}), "seed": TELL, "cache_salt": "one"}
    if path == "/v1/embeddings":
        assert echo.http.post(path, json={**body, "model": "wren-mini"}).status_code == 200
        return
    told = json.loads(echo.http.post(path, json=body).json()["error"]["message"])
    assert told["salt"].endswith("\0one")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("salt", ["", "x" * 257, 1, ["a"], {}, "\ud800"])
def test_a_salt_is_a_short_text(echo: ServerProcess, path: str, salt: Any) -> None:
    content = json.dumps({"model": MODEL, **BODIES[path], "cache_salt": salt})
    headers = {"content-type": "application/json"}
    refused = echo.http.post(path, content=content, headers=headers)
    assert refused.status_code == 400
    assert "cache_salt" in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", REFUSED)
def test_what_must_not_be_ignored_is_refused_by_name(echo: ServerProcess, field: str) -> None:
    ask, harmless = (False, True) if field == "cache_prompt" else ("x", None)
    for path, body in BODIES.items():
        if path == "/v1/responses" and field == "store":
            ask = True  # a known field there
        refused = echo.http.post(path, json={"model": MODEL, **body, field: ask})
        assert refused.status_code == 400, path
        error = refused.json()["error"]
        assert error["message"].startswith(f"{field}: ")
        if path != "/v1/messages":
            assert error["param"] == field
    for value in (harmless, None):
        body = {"model": MODEL, "prompt": "a", field: value}
        assert echo.http.post("/v1/completions", json=body).status_code == 200


def test_other_fields_are_ignored_and_named_in_short(echo: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "unheard_of" + "x" * 10_000: 1}
    assert echo.http.post("/v1/completions", json=body).status_code == 200
    echo.until_said("'unheard_of")
    assert "x" * 100 not in echo.output
