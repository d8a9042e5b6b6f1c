"""Faults of a model's tokenizer and chat template are named when it is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from ballast.core.model import ModelSpec
from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.text.template_check import check_tokenizer
from ballast.server.text.tokenizer import Tokenizer
from tests.cluster.fake_device import spec as spec_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def rendering() -> Iterator[Any]:
    """Checks a tokenizer."""
    with asyncio.Runner() as runner:
        renderer = TemplateRenderer()

        def check(tokenizer: Tokenizer, spec: ModelSpec) -> None:
            runner.run(check_tokenizer(tokenizer, spec.name, spec, renderer))

        yield check
        runner.run(renderer.close())


def tokenizer_with(template: str, *special: str, eos: str | None = None) -> Tokenizer:
    backend = train_tokenizer(["a b c"], 300, 99)
    backend.add_special_tokens({"additional_special_tokens": list(special)})
    if eos is not None:
        backend.eos_token = eos
    backend.chat_template = template
    return Tokenizer(backend)


def with_ends(*tokens: int | None) -> ModelSpec:
    made = spec_of("heron")
    object.__setattr__(made, "eos_token_ids", tuple(t for t in tokens if t is not None))
    return made


MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def test_an_answer_that_no_end_token_ends_is_warned_of(
    rendering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    base = tokenizer_with(CHATML, *MARKS, eos="<|endoftext|>")
    rendering(base, with_ends(base.token_id("<|endoftext|>")))
    assert "heron: its chat template ends an answer with <|im_end|>" in caplog.text
    assert "its end tokens are <|endoftext|>" in caplog.text
    assert not base.chat.fault
    caplog.clear()
    rendering(tokenizer_with(PLAIN, *MARKS, eos="<|endoftext|>"), with_ends())
    assert r"ends an answer with '\nuser: '" in caplog.text


def test_end_tokens_of_both_files_are_united(
    rendering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """generation_config.json has one, tokenizer_config.json the other."""
    for ours, own in (("<|endoftext|>", "<|im_end|>"), ("<|im_end|>", "<|endoftext|>")):
        tokenizer = tokenizer_with(CHATML, *MARKS, eos=own)
        spec = with_ends(tokenizer.token_id(ours))
        rendering(tokenizer, spec)
        assert set(tokenizer.spelled(tokenizer.chat_ends(spec))) == {ours, own}
    refusing = "{{ raise_exception('one message alone') }}"
    rendering(tokenizer_with(refusing, *MARKS, eos="<|im_end|>"), with_ends())
    assert caplog.text == ""


def test_tokens_beyond_the_embedding_are_named(
    rendering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_with(CHATML, *MARKS, eos="<|im_end|>")
    last = tokenizer.token_id("<|endoftext|>")
    assert last is not None
    spec = spec_of("heron", vocab=last + 1)
    rendering(tokenizer, spec)
    assert caplog.text == ""
    rendering(tokenizer, spec_of("heron", vocab=last))
    assert f"1 tokens beyond its embedding of {last} rows" in caplog.text
    assert "'<|endoftext|>'" in caplog.text
