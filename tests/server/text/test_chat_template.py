"""Chat templates are rendered as `transformers` does it, and hurt nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ballast.bench.server_process import children_of
from ballast.core.errors import InvalidRequest, Unavailable
from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.conversation import Message
from ballast.server.http.request_context import RequestContext
from ballast.server.openai.request import ChatRequest
from ballast.server.prompt_encoder import PromptEncoder
from ballast.server.text import chat_template
from ballast.server.text.chat_template import (
    CPU_SECONDS,
    MEMORY_BYTES,
    TemplateRenderer,
    TemplateTooCostly,
)
from ballast.server.text.template_check import check_tokenizer
from ballast.server.text.template_messages import EncodedJob, TemplateJob
from ballast.server.text.tokenizer import Tokenizer
from tests.server.process import DEADLINE
from tests.server.tools.test_tool_templates import OTHERS, TEMPLATES

RANGES = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
EVIL = {
    "nested ranges": RANGES,
    "a long product": "{{ 'a' * 10**11 }}",
    "a number without end": "{{ 9**(9**9) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "padding": "{{ '%100000000000d' % 1 }}",
    "a filter": "{{ 'a' | center(10**11) }}",
    "too much text": "{{ 'a' * 9**8 }}{{ 'a' * 9**8 }}",
}
USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
CONVERSATION = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
ALL = {**TEMPLATES, **OTHERS}


class Rendering:
    """A renderer on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, **limits: Any) -> None:
        self.run = runner.run
        self.renderer = TemplateRenderer(**limits)

    def text(self, template: str, **variables: Any) -> str:
        return self.run(self.renderer.render(job(template, **variables)))


def job(template: str, **variables: Any) -> EncodedJob:
    return TemplateJob(
        template=template,
        messages=[USER],
        tools=None,
        add_generation_prompt=True,
        continue_final_message=False,
        variables=variables,
    ).encoded()


@pytest.fixture(scope="module")
def rendering() -> Iterator[Rendering]:
    """With little time, so that tests need not wait for what takes too much."""
    with asyncio.Runner() as runner:
        made = Rendering(runner, cpu_seconds=0.5)
        yield made
        runner.run(made.renderer.close())


def test_api_keys_take_turns_at_a_template(
    runner_of_its_own: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[bytes] = []

    async def answer(self: TemplateRenderer, question: bytes) -> bytes:
        await asyncio.sleep(0)
        rendered.append(question)
        return b"t"

    monkeypatch.setattr(TemplateRenderer, "_ask", answer)

    async def scenario() -> None:
        renderer = TemplateRenderer()
        asked = [EncodedJob("same", f"{key}{i}".encode()) for key in "xy" for i in range(3)]
        await asyncio.gather(*(renderer.render(job, job.json.decode()[0]) for job in asked))

    runner_of_its_own.run(asyncio.wait_for(scenario(), DEADLINE))
    assert rendered == [b"x0", b"x1", b"y0", b"x2", b"y1", b"y2"]


def test_a_conversations_messages_are_dropped_once_they_are_encoded(
    runner_of_its_own: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for its template, thousands of objects would cost each garbage collection."""
    asked = ChatRequest(model="m", messages=[Message(role="user", content="hello")])
    left: list[int] = []

    async def answer(self: TemplateRenderer, question: bytes) -> bytes:
        left.append(len(asked.messages))
        return b"thello"

    monkeypatch.setattr(TemplateRenderer, "_ask", answer)
    theirs = train_tokenizer(["hello"], 300, 99)
    theirs.chat_template = "{{ messages }}"
    spec: Any = SimpleNamespace(name="m", max_model_len=99, vocab=999)
    renderer, tokenizer = TemplateRenderer(), Tokenizer(theirs)
    runner_of_its_own.run(check_tokenizer(tokenizer, "m", None, renderer))
    left.clear()
    encoding = PromptEncoder(renderer).encode_conversation(asked, spec, tokenizer, RequestContext())
    assert runner_of_its_own.run(encoding)
    assert left == [0]


@pytest.fixture
def runner_of_its_own() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("template", ALL.values(), ids=ALL)
def test_as_transformers_does_it(rendering: Rendering, template: str) -> None:
    theirs = train_tokenizer(["a b"], 300, 99)
    theirs.chat_template = {"default": template + "{{ eos_token }}", "tool_use": template}
    made = Tokenizer(theirs).chat.job(CONVERSATION, tools=[TOOL], more={"extra": [{"a": None}]})
    assert rendering.run(rendering.renderer.render(made)) == theirs.apply_chat_template(
        CONVERSATION, tools=[TOOL], extra=[{"a": None}], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(("answer", "continued"), [(True, False), (False, False), (False, True)])
def test_where_a_conversation_ends(rendering: Rendering, answer: bool, continued: bool) -> None:
    theirs = train_tokenizer(["a b"], 300, 99)
    made = Tokenizer(theirs).chat.job([USER], answer=answer, continued=continued)
    assert rendering.run(rendering.renderer.render(made)) == theirs.apply_chat_template(
        [USER], tokenize=False, add_generation_prompt=answer, continue_final_message=continued
    )


@pytest.mark.parametrize("template", EVIL.values(), ids=EVIL)
def test_a_template_without_end_is_ended(rendering: Rendering, template: str) -> None:
    with pytest.raises(TemplateTooCostly, match="takes more than"):
        rendering.text(template)
    assert rendering.text("{{ messages[0].content }}") == "Hello"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only cats') }}", "only cats"),
        ("{{ messages.x.y }}", "no attribute"),
        ("{% for", "end of template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '\\ud800' }}", "surrogates"),
        ("{{ raise_exception('\\ud800') }}", "[?]"),
        ("{{ raise_exception('a' * 10**6) }}", "a{900}"),
    ],
)
def test_a_template_that_refuses_says_why(rendering: Rendering, template: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        rendering.text(template)
    assert not isinstance(caught.value, TemplateTooCostly)
    assert len(str(caught.value)) < 1200


DEEP: list[Any] = []
for _ in range(9000):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", ["\ud800", DEEP], ids=["half a pair", "deep"])
def test_what_no_template_can_be_given_is_refused(rendering: Rendering, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="does not accept"):
        rendering.text("{{ x }}", x=value)


def test_a_template_does_not_hold_up_others() -> None:
    """However many clients ask for it."""

    async def scenario() -> None:
        renderer = TemplateRenderer(cpu_seconds=300)
        evil = [asyncio.ensure_future(renderer.render(job(RANGES))) for _ in range(9)]
        try:
            for text in ("a", "b"):
                assert await renderer.render(job(text)) == text
            assert not any(task.done() for task in evil)
        finally:
            for task in evil:
                task.cancel()
            await asyncio.wait(evil)
            await renderer.close()

    asyncio.run(scenario())


def test_nobody_renders_for_clients_that_left() -> None:
    """Else those who ask and leave would fill the machine, two seconds of it each."""

    async def scenario() -> None:
        renderer = TemplateRenderer(cpu_seconds=300)
        assert await renderer.render(job("a")) == "a"  # its child is kept for the next one
        assert renderer._parent is not None
        parent = renderer._parent.pid
        [kept] = living(parent)
        for _ in range(3):
            evil = asyncio.ensure_future(renderer.render(job(RANGES)))
            while renderer._idle or not (children := living(parent)):
                await asyncio.sleep(0)  # until it is at work
            evil.cancel()
            await asyncio.wait({evil})
            while not children.isdisjoint(living(parent)):
                await asyncio.sleep(0.01)
        assert kept not in living(parent)
        at_work = asyncio.ensure_future(renderer.render(job(RANGES)))
        while not (children := living(parent)):
            await asyncio.sleep(0.01)
        await renderer.close()
        with pytest.raises((TemplateTooCostly, Unavailable)):
            await at_work
        while any(Path(f"/proc/{child}").exists() for child in children):
            await asyncio.sleep(0.01)

    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE):
            await scenario()

    asyncio.run(within_deadline())


def living(parent: int) -> set[int]:
    """Children of a process, but for those that have ended and wait to be noticed."""
    found = set()
    for child in children_of(parent):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(child)
    return found


def test_children_that_are_killed_are_replaced(rendering: Rendering) -> None:
    rendering.text("a")
    parent = rendering.renderer._parent
    assert parent is not None
    os.kill(parent.pid, signal.SIGKILL)
    rendering.run(parent.wait())
    with pytest.raises(Unavailable, match="chat templates"):
        rendering.text(RANGES)  # ends the child that is left
    assert rendering.text("b") == "b"


def test_another_child_is_asked_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is stopped, or hangs: processor time bounds templates, so it is not theirs."""

    async def scenario() -> None:
        renderer = TemplateRenderer()
        assert await renderer.render(job("a")) == "a"  # its child is kept for the next one
        assert renderer._parent is not None
        [child] = living(renderer._parent.pid)
        os.kill(child, signal.SIGSTOP)
        monkeypatch.setattr(chat_template, "WALL_SECONDS", 3.0)
        asked = asyncio.ensure_future(renderer.render(job("b")))
        while child in living(renderer._parent.pid):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(chat_template, "WALL_SECONDS", 60.0)
        assert await asked == "b"
        await renderer.close()

    asyncio.run(scenario())


def test_a_forking_process_that_never_forks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        renderer = TemplateRenderer()
        await renderer.prepare()
        hung = renderer._parent
        assert hung is not None
        hung.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(chat_template, "WALL_SECONDS", 1.0)
        asked = asyncio.ensure_future(renderer.render(job("a")))
        await hung.wait()
        monkeypatch.setattr(chat_template, "WALL_SECONDS", 60.0)
        assert await asked == "a"
        await renderer.close()

    asyncio.run(scenario())


def test_what_children_need_is_loaded_before_they_are_needed() -> None:
    async def scenario() -> None:
        renderer = TemplateRenderer()
        try:
            await renderer.prepare()
            prepared = renderer._parent
            assert prepared is not None
            await renderer.prepare()
            assert await renderer.render(job("a")) == "a"
            assert renderer._parent is prepared
        finally:
            await renderer.close()
        assert prepared.returncode is not None

    asyncio.run(scenario())


def test_a_template_that_never_ends_is_found_before_clients_find_it(
    rendering: Rendering, caplog: pytest.LogCaptureFixture
) -> None:
    backend = train_tokenizer(["a b"], 300, 99)
    broken = ("{% for a in %}", "{{ a | none_such }}", "{% if a %}")
    sound_ones = ("{{ raise_exception('no') }}", "{{ a.b.c }}")
    templates = {RANGES: False, **dict.fromkeys(broken, False), **dict.fromkeys(sound_ones, True)}
    for template, sound in templates.items():
        backend.chat_template = template
        tokenizer = Tokenizer(backend)
        rendering.run(check_tokenizer(tokenizer, "heron", None, rendering.renderer))
        assert (tokenizer.chat.fault == "") == sound
    assert caplog.text.count("heron answers no conversations") == 4
    assert caplog.text.count("does not parse: line 1: ") == 3
    tokenizer.chat.fault = "it never ends"
    with pytest.raises(InvalidRequest, match="it never ends"):
        tokenizer.chat.job([USER])


def test_limits_suffice_for_long_conversations() -> None:
    """The longest that a body can hold, and thousands of messages; by processor time, not ours."""

    async def scenario() -> None:
        renderer = TemplateRenderer(CPU_SECONDS, MEMORY_BYTES)
        template = (
            TEMPLATES["hermes"] + "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
        )
        long = TemplateJob(
            template=template,
            messages=[{"role": "user", "content": "hello " * 345}] * 4096,
            tools=[TOOL] * 128,
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        ).encoded()
        try:
            assert len(await renderer.render(long)) > 8 << 20
        finally:
            await renderer.close()

    asyncio.run(scenario())
