"""What a request is answered without is named in a header, and compressed bodies are refused by
name."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from ballast.server.http.request_context import RequestContext
from tests.server.process import ServerProcess

MODEL = "wren-mini"
USER = [{"role": "user", "content": "a b"}]
CHAT = {"model": MODEL, "messages": USER, "max_tokens": 3}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CUSTOM = {"type": "custom", "custom": {"name": "apply_patch"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "web_search"}]}, "tool web_search"),
        (
            "/v1/chat/completions",
            CHAT | {"tools": [CUSTOM, FUNCTION], "tool_choice": "auto"},
            "tool custom apply_patch",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tools": [{"type": "a\r\nb: c", "name": "\u00e9"}]},
            "tool a__b: c _",
        ),
        (
            "/v1/responses",
            {
                "model": MODEL,
                "input": [*USER, {"type": "web_search_call", "id": "w"}],
                "max_output_tokens": 3,
                "tools": [
                    {"type": "namespace", "name": "docs", "tools": []},
                    {"type": "local_shell"},
                ],
                "tool_choice": "auto",
            },
            "tool namespace docs, tool local_shell, item web_search_call",
        ),
        (
            "/v1/messages?beta=true",
            CHAT | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tool web_search_20250305 web_search",
        ),
    ],
)
def test_tools_that_cannot_run_are_left_out_and_named(
    echo: ServerProcess, path: str, body: dict[str, Any], named: str, stream: bool
) -> None:
    answer = echo.http.post(path, json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ballast-left-out"] == named


def test_of_much_that_is_left_out_some_is_named() -> None:
    many = RequestContext(left_out=[f"tool kind{i}" for i in range(20)] + ["tool kind0"])
    assert many.left_out_header.decode().count("tool kind") == 16
    assert many.left_out_header.endswith(b", and 4 more")
    assert len(RequestContext(left_out=["a " * 10**6]).left_out_header) <= 128


def test_what_is_left_out_counts_no_tokens(echo: ServerProcess) -> None:
    body = CHAT | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    counted = echo.http.post("/v1/messages/count_tokens", json=body)
    assert counted.headers["x-ballast-left-out"] == "tool web_search_20250305 web_search"
    plain = echo.http.post("/v1/messages/count_tokens", json=CHAT)
    assert counted.json() == plain.json()
    assert "x-ballast-left-out" not in plain.headers


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tools": [CUSTOM], "tool_choice": "required"}, "tool_choice", "no function to call"),
        (
            {"tools": [CUSTOM, FUNCTION], "tool_choice": CUSTOM},
            "tool_choice.type",
            "custom cannot be called here",
        ),
    ],
)
def test_a_choice_of_what_is_left_out_is_refused(
    echo: ServerProcess, fields: dict[str, Any], param: str, why: str
) -> None:
    answer = echo.http.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/embeddings"]
)
@pytest.mark.parametrize("coding", ["gzip", "zstd", "BR", "gzip, identity"])
def test_a_compressed_body_is_refused_by_name(echo: ServerProcess, path: str, coding: str) -> None:
    body = gzip.compress(json.dumps(CHAT).encode())
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = echo.http.post(path, content=body, headers=headers)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"
    message = answer.json()["error"]["message"]
    assert coding.strip().lower() in message
    assert "uncompressed" in message


def test_a_body_that_says_it_is_as_it_is_is_taken(echo: ServerProcess) -> None:
    headers = {"content-encoding": "identity"}
    assert echo.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}], "a"),
        ([{"type": "thinking", "thinking": "x"}, {"type": "output_text", "text": "b"}], "b"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_parts_are_joined_by_line_breaks(echo: ServerProcess, content: Any, text: str) -> None:
    assert tokens(echo, [{"role": "user", "content": content}]) == tokens(
        echo, [{"role": "user", "content": text}]
    )


@pytest.mark.parametrize("none", [[], None])
def test_an_empty_list_of_calls_is_none(echo: ServerProcess, none: Any) -> None:
    answered = {"role": "assistant", "content": "c"}
    assert tokens(echo, [*USER, answered | {"tool_calls": none}]) == tokens(echo, [*USER, answered])


def tokens(echo: ServerProcess, messages: Any) -> list[int]:
    answer = echo.http.post("/tokenize", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])
