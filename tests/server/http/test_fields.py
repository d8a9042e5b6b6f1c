"""What becomes of a request's fields, told by a device that fails with what it was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.fake_device import TELL
from tests.server.process import ServerProcess

MODEL = "atlas-chat"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(echo: ServerProcess, route: str, fields: dict[str, Any]) -> Any:
    """The answer's status and body; JSON as Python writes it, NaN and half pairs included."""
    body: dict[str, Any] = {"model": MODEL}
    if route == CHAT:
        body["messages"] = [{"role": "user", "content": "a"}]
    elif route == COMPLETIONS:
        body["prompt"] = "a"
    headers = {"content-type": "application/json"}
    response = echo.http.post(route, content=json.dumps(body | fields), headers=headers)
    return response.status_code, response.json()


def submission_of(echo: ServerProcess, route: str, /, **fields: Any) -> Any:
    """The submission that a request became."""
    status, body = post(echo, route, {**fields, "seed": TELL})
    assert (status, body["error"]["code"]) == (500, "told"), body
    return json.loads(body["error"]["message"])


@pytest.mark.parametrize(
    ("field", "value", "sent"),
    [
        ("temperature", 0.5, 0.5),
        ("temperature", 1e-300, 0.0),
        ("temperature", None, 1.0),
        ("top_p", 0.5, 0.5),
        ("top_k", -1, 0),
        ("min_p", 0.25, 0.25),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 1.5, 1.5),
        ("repetition_penalty", 1.25, 1.25),
        ("repetition_penalty", None, 1.0),
        ("logit_bias", {"7": 2, "3": -100, "5": 0}, [[3, -100.0], [7, 2.0]]),
        ("min_tokens", 2, 2),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_sampling(echo: ServerProcess, route: str, field: str, value: Any, sent: Any) -> None:
    assert submission_of(echo, route, **{field: value})["sampling"][field] == sent


def test_what_ends_an_output_cannot_come_too_early(echo: ServerProcess) -> None:
    submission = submission_of(echo, COMPLETIONS, min_tokens=3, stop_token_ids=[9, 4])
    assert submission["sampling"]["banned"] == [4, 9]
    assert submission["stop_token_ids"] == [9, 4]
    assert submission_of(echo, COMPLETIONS, stop_token_ids=[9])["sampling"]["banned"] == []


def test_log_probabilities_are_asked_for(echo: ServerProcess) -> None:
    assert submission_of(echo, COMPLETIONS)["sampling"]["logprobs"] is None
    assert submission_of(echo, COMPLETIONS, logprobs=3)["sampling"]["logprobs"] == 3
    assert submission_of(echo, CHAT, logprobs=True)["sampling"]["logprobs"] == 0
    assert submission_of(echo, CHAT, logprobs=True, top_logprobs=20)["sampling"]["logprobs"] == 20
    assert submission_of(echo, COMPLETIONS, logprobs=3)["prompt_logprobs"] is None
    assert submission_of(echo, COMPLETIONS, logprobs=3, echo=True)["prompt_logprobs"] == 3
    assert submission_of(echo, COMPLETIONS, echo=True)["prompt_logprobs"] is None


def test_a_smaller_priority_comes_earlier(echo: ServerProcess) -> None:
    """To the engine, a larger one is the more important."""
    assert submission_of(echo, COMPLETIONS, priority=-5)["priority"] == 5
    assert submission_of(echo, CHAT)["priority"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("-inf")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-30),
        ("repetition_penalty", "much"),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"\ud800": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", {str(i): 1 for i in range(5000)}),
        ("stop_token_ids", [100_000]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [10**40]),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("priority", 2**31),
        ("priority", 0.5),
        ("user", "\ud800"),
        ("n", True),
        ("stream", "maybe"),
        ("stream_options", {"include_usage": 7}),
        ("seed", float("inf")),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_bad_value_is_refused(echo: ServerProcess, route: str, field: str, value: Any) -> None:
    status, body = post(echo, route, {"max_tokens": 1, field: value})
    assert (status, body["error"]["param"]) == (400, field), body


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"max_completion_tokens": 0}, "max_tokens"),
        (CHAT, {"min_tokens": 5, "max_completion_tokens": 4}, "min_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "echo": False}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "\ud800"}] * 2}, "messages"),
        (CHAT, {"messages": [{"role": "\ud800", "content": "a"}]}, "messages"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{1}}"}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/embeddings", {"input": [], "model": "wren-mini"}, "input"),
        ("/v1/embeddings", {"input": [[]], "model": "wren-mini"}, "input"),
        ("/v1/embeddings", {"input": "a", "model": "wren-mini", "dimensions": 7}, "dimensions"),
        (
            "/v1/embeddings",
            {"input": "a", "model": "wren-mini", "encoding_format": "int8"},
            "encoding_format",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    echo: ServerProcess, route: str, fields: dict[str, Any], param: str
) -> None:
    status, body = post(echo, route, fields)
    assert (status, body["error"]["param"]) == (400, param), body


def test_bodies_that_are_hard_to_read(echo: ServerProcess) -> None:
    headers = {"content-type": "application/json"}
    for body in (
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"model": "atlas-chat", "prompt": "a", "n": ' + b"9" * 10_000 + b"}",
        b'{"model": "\xff"}',
        b"[]",
        b"null",
        b"",
    ):
        for route in (COMPLETIONS, CHAT, "/tokenize", "/v1/embeddings"):
            response = echo.http.post(route, content=body, headers=headers)
            assert response.status_code in (400, 413), (body[:20], response.text[:200])


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"9" * 2_000_000: "x"}},
        {"messages": [{"role": 7, "content": "x" * 2_000_000}]},
        {"seed": "x" * 2_000_000},
        {"model": "x" * 2_000_000},
        {"response_format": {"type": "x" * 2_000_000}},
        {"tool_choice": "x" * 2_000_000},
        {"stop": ["x" * 2_000_000] * 2 + [7]},
        {"cache_salt": "x" * 2_000_000},
        {"chat_template_kwargs": "x" * 2_000_000},
    ],
    ids=lambda more: next(iter(more)),
)
def test_errors_quote_little_of_a_large_body(echo: ServerProcess, more: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **more}
    refused = echo.http.post("/v1/chat/completions", json=body)
    assert 400 <= refused.status_code < 500
    assert len(refused.content) < 10_000
