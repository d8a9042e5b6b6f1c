"""What is wrong with a field is said in JSON's words, and where it is in the client's body."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ballast.server.http.faults import Fault
from ballast.server.messages_api.request import MessagesRequest
from ballast.server.openai.request import ChatRequest
from ballast.server.responses_api.request import ResponsesRequest

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ChatRequest, {"messages": "x"}, "messages: it should be a list; it was 'x'"),
        (ChatRequest, {"messages": [USER, 3]}, "messages[1]: it should be an object; it was 3"),
        (ChatRequest, {"messages": [{}]}, "messages[0].role: it is required"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: it is required",
        ),
        (ChatRequest, {"stop": ["a"] * 65}, "stop: at most 64, not 65"),
        (ChatRequest, {"stop": [3]}, "stop[0]: it should be a text; it was 3"),
        (ChatRequest, {"stream": "x"}, "stream: it should be true or false; it was 'x'"),
        (ChatRequest, {"seed": 1.5}, "seed: it should be a whole number; it was 1.5"),
        (ChatRequest, {"tools": ["x"]}, "tools[0]: it should be an object; it was 'x'"),
        (
            ResponsesRequest,
            {"input": [{"type": "function_call", "name": "f", "arguments": ""}]},
            "input[0].call_id: it is required",
        ),
        (ResponsesRequest, {"input": [{"type": 3}]}, "input[0]: its type should be a text"),
        (
            ResponsesRequest,
            {"input": [{"role": "tool", "content": "a"}]},
            "input[0].role: it should be 'user', 'assistant', 'system' or 'developer'; it was",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id: it is required",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text: it should be a text; it was 3",
        ),
        (MessagesRequest, {"max_tokens": None}, "max_tokens: it should be a whole number"),
        (ChatRequest, {"logit_bias": {"9" * 999: "x"}}, "logit_bias." + "9" * 80),
    ],
)
def test_the_first_fault_is_named_with_its_place(
    kind: Any, fields: dict[str, Any], message: str
) -> None:
    body = {"model": "m", "messages": [USER], "input": "a", "max_tokens": 1} | fields
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    found = Fault.of_validation(errors, kind, body)
    assert found.param == next(iter(fields))
    assert found.message.startswith(message)
    assert len(found.message) < 300
