"""Conversations are encoded within bounds, whatever becomes of them before the template."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ballast.core.errors import InvalidRequest
from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.conversation import Message
from ballast.server.http.request_context import RequestContext
from ballast.server.openai.request import ChatRequest
from ballast.server.prompt_encoder import PromptEncoder
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.text.tokenizer import Tokenizer
from tests.server.agents.families import FAMILIES

KNOWS_NO_CALLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def renderer(runner: asyncio.Runner) -> Iterator[TemplateRenderer]:
    made = TemplateRenderer()
    yield made
    runner.run(made.close())


@pytest.mark.parametrize("parser", ["pythonic", "hermes", "mistral"])
@pytest.mark.parametrize("template", [KNOWS_NO_CALLS, *FAMILIES.values()])
def test_arguments_of_earlier_calls_are_bounded_together(
    runner: asyncio.Runner, renderer: TemplateRenderer, parser: str, template: str
) -> None:
    """They are JSON within JSON: a body of one text may hold millions of values. They are counted
    before any of them is read, also where calls are written as text."""
    arguments = "[" + "{}," * 9_000 + "{}]"
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    turns = [
        Message(role="user", content="hello"),
        Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]}),
    ]
    theirs = train_tokenizer(["hello"], 300, 1 << 20)
    theirs.chat_template = template
    tokenizer = Tokenizer(theirs, parser)
    spec: Any = SimpleNamespace(name="m", max_model_len=1 << 20, vocab=1 << 31)

    def encoded(times: int) -> list[int]:
        asked = ChatRequest(model="m", messages=turns * times)
        encoder = PromptEncoder(renderer)
        encoding = encoder.encode_conversation(asked, spec, tokenizer, RequestContext())
        return runner.run(encoding)

    assert encoded(1)
    with pytest.raises(InvalidRequest, match="too many values"):
        encoded(10)
