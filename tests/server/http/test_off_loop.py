"""What takes long runs off the event loop and, where it can, without the interpreter lock."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ballast.core.errors import ContextLengthExceeded
from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.http import bodies, json_route
from ballast.server.http.bodies import SMALL_BYTES, weigh
from ballast.server.http.json_route import BodyDecoder
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import RequestContext
from ballast.server.prompt_encoder import PromptEncoder
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.text.tokenizer import HUGE_TEXT, LONG_TEXT, Tokenizer

LOOP = threading.main_thread().name


class Recorder:
    """A tokenizer that notes which threads it is used in."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self._tokenizer = Tokenizer(train_tokenizer(["hello world " * 9], 300, 128))

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return self._tokenizer.encode(text, **options)


def encoded(texts: list[str], most: int) -> tuple[list[list[int]], list[str]]:
    """Tokens, and the kinds of threads they were found in."""
    recorder = Recorder()
    tokenizer: Any = recorder
    spec: Any = SimpleNamespace(name="m", max_model_len=most, vocab=2**31)
    encoder = PromptEncoder(TemplateRenderer())
    found = asyncio.run(encoder.encode_texts(texts, spec, tokenizer, "prompt", special=True))
    return found, [name.split("_")[0] for name in recorder.threads]


@pytest.mark.parametrize(
    ("texts", "thread"),
    [
        (["hello"], LOOP),
        (["h" * LONG_TEXT], LOOP),
        (["h" * (LONG_TEXT + 1)], "long"),
        (["hello"] * LONG_TEXT, "long"),
        (["h" * (HUGE_TEXT + 1)], "huge"),
    ],
)
def test_long_texts_are_tokenized_in_threads_of_their_own(texts: list[str], thread: str) -> None:
    tokens, threads = encoded(texts, most=10**6)
    assert set(threads) == {thread}
    assert len(tokens) == len(texts)


def test_a_text_that_is_too_long_names_its_field() -> None:
    with pytest.raises(ContextLengthExceeded, match="context of 'm' is 9 tokens") as caught:
        encoded(["short", "x" * 10_000], most=9)
    assert caught.value.param == "prompt"


def test_tokenizing_leaves_the_interpreter_lock_alone() -> None:
    """`encode` holds it, `encode_batch_fast` does not."""
    tokenizer = Tokenizer(train_tokenizer(["hello world " * 9], 300, 128))
    backend = tokenizer._backend
    expected = backend.encode("hello").ids
    tokenizer._backend = SimpleNamespace(encode_batch_fast=backend.encode_batch_fast)
    assert tokenizer.encode("hello") == expected


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1])
def test_large_bodies_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    threads: list[str] = []

    def noting(function: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments)

        return noted

    monkeypatch.setattr(bodies, "weight", noting(bodies.weight))
    monkeypatch.setattr(json_route, "_decoded_large", noting(json_route._decoded_large))
    monkeypatch.setattr(json_route, "_decoded_small", noting(json_route._decoded_small))
    body = b'"' + b"x" * (size - 2) + b'"'

    async def scenario() -> None:
        await weigh(body, 100)
        assert len(await BodyDecoder().decode(body, "")) == size - 2

    asyncio.run(scenario())
    assert [name.split("_")[0] for name in threads] == (
        [LOOP] * 2 if size == SMALL_BYTES else ["bodies"] * 2
    )


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES + 1])
def test_what_a_large_body_holds_is_gone_through_in_a_thread(size: int) -> None:
    async def scenario() -> str:
        context = RequestContext(body_bytes=size)
        return await off_loop(context.large_body, lambda: threading.current_thread().name)

    assert (asyncio.run(scenario()) == LOOP) == (size == SMALL_BYTES)
