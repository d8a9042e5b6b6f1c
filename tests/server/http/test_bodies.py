"""What a JSON body weighs, and that no field of a request has more than its bound is validated."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ballast.server.conversation import MOST_MESSAGES, MOST_PARTS
from ballast.server.http import bodies
from ballast.server.http.bodies import MOST_WEIGHT, WEIGHT_BYTES, weight
from ballast.server.http.fields import MOST_BIASED, MOST_FIELDS, MOST_PROMPTS, MOST_STOPS
from ballast.server.openai.request import ChatRequest, CompletionRequest
from ballast.server.openai.text_request import DetokenizeRequest, EmbeddingRequest
from ballast.server.tools.request import MOST_FUNCTIONS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a,[{"\\:]}é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b,"\\['), inner),
    max_leaves=30,
)


def true_weight(value: object) -> int:
    """By the definition, without commas."""
    if isinstance(value, str):
        return 2
    if isinstance(value, list):
        return 4 + sum(map(true_weight, value)) + max(0, len(value) - 1)
    if isinstance(value, dict):
        members = sum(2 + true_weight(v) for v in value.values())
        return 4 + members + max(0, len(value) - 1)
    return 0


@given(value=JSON, window=st.integers(min_value=2, max_value=9), ascii=st.booleans())
def test_a_weight_is_exact_wherever_windows_end(value: object, window: int, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode()
    exact = true_weight(value)
    assert weight(body, sys.maxsize) >= exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_WINDOW", window)
        assert weight(body, exact) == exact
        if exact:
            assert weight(body, exact - 1) > exact - 1


def test_text_full_of_commas_weighs_what_a_text_does() -> None:
    body = json.dumps({"prompt": ',[{"\\' * MOST_WEIGHT}).encode()
    assert weight(body, MOST_WEIGHT) == 4 + 2 + 2


@pytest.mark.parametrize("element", ["{}", "[]", "0", '""', "[0]", '{"":0}', "1e9", "12345678"])
def test_a_decoded_body_takes_no_more_memory_than_its_weight_says(element: str) -> None:
    body = ("[" + ",".join([element] * 10_000) + "]").encode()
    value = msgspec.json.decode(body)
    assert _size(value) <= WEIGHT_BYTES * weight(body, sys.maxsize) + len(body)


def _size(value: Any) -> int:
    """Bytes; what is shared by all Python counts nothing."""
    size = sys.getsizeof(value)
    if isinstance(value, list):
        return size + sum(map(_size, value))
    if isinstance(value, dict):
        return size + sum(map(_size, value.values()))
    return 0 if value == "" or (isinstance(value, int) and value < 257) else size


MESSAGE = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
TOO_MANY = [
    (ChatRequest, "messages", [{}] * 10_000),
    (ChatRequest, "messages", [MESSAGE] * (MOST_MESSAGES + 1)),
    (ChatRequest, "messages", [{"role": "user", "content": [PART] * (MOST_PARTS + 1)}]),
    (ChatRequest, "messages", [{"role": "user", "content": [PART] * (MOST_PARTS // 2 + 1)}] * 2),
    (ChatRequest, "tools", [{}] * (MOST_FUNCTIONS + 1)),
    (ChatRequest, "logit_bias", {str(i): 0 for i in range(MOST_BIASED + 1)}),
    (ChatRequest, "logit_bias", dict.fromkeys(map("x{}".format, range(10_000)), 0)),
    (ChatRequest, "stop", ["a"] * (MOST_STOPS + 1)),
    (ChatRequest, "stop", [0] * 10_000),
    (ChatRequest, "stop", ["a" * 1025]),
    (ChatRequest, "stop_token_ids", [1] * 65),
    (ChatRequest, "stop_token_ids", ["a"] * 10_000),
    (CompletionRequest, "prompt", ["a"] * (MOST_PROMPTS + 1)),
    (CompletionRequest, "prompt", [[1]] * (MOST_PROMPTS + 1)),
    (CompletionRequest, "prompt", [None] * 10_000),
    (CompletionRequest, "prompt", [["a"] * 10_000] * 10),
    (EmbeddingRequest, "input", [{}] * 10_000),
    (DetokenizeRequest, "tokens", ["a"] * 10_000),
]
SOUND: dict[str, Any] = {"model": "m", "messages": [MESSAGE], "prompt": "a"}


@pytest.mark.parametrize(("kind", "field", "value"), TOO_MANY)
def test_what_is_too_much_is_refused_by_the_first_error(
    kind: type[ChatRequest], field: str, value: Any
) -> None:
    """One error for each kind of value that the field may have, and not one for each element."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**SOUND, field: value})
    assert caught.value.error_count() <= 4
    assert {e["loc"][0] for e in caught.value.errors()} == {field}


def test_a_request_has_few_fields() -> None:
    many = dict.fromkeys(map("x{}".format, range(MOST_FIELDS)), 0)
    with pytest.raises(ValidationError, match=f"at most {MOST_FIELDS}"):
        ChatRequest.model_validate(SOUND | many)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [MESSAGE] * MOST_MESSAGES),
        ("messages", [{"role": "user", "content": [PART] * MOST_PARTS}]),
        ("tools", [{}] * MOST_FUNCTIONS),
        ("logit_bias", {str(i): 0 for i in range(MOST_BIASED)}),
        ("stop", ["a"] * 64),
        ("stop", "a"),
    ],
)
def test_as_much_as_may_be_is_taken(field: str, value: Any) -> None:
    ChatRequest.model_validate({**SOUND, field: value})
