"""Reasoning before an answer: told apart whatever the tokens, and written in each API's form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ballast.core.clock import Clock
from ballast.core.event import FinishedOutput, TokenOutput
from ballast.server.generate.choice import Choice, StopConditions
from ballast.server.generate.output_parser import OutputParser
from ballast.server.messages_api.form import MessageForm
from ballast.server.messages_api.request import MessagesRequest
from ballast.server.ollama_api.form import AnswerWriter, OllamaForm
from ballast.server.openai.forms import ChatForm, Form, Head
from ballast.server.openai.records import Usage
from ballast.server.openai.request import ChatRequest
from ballast.server.responses_api.form import ResponseForm
from ballast.server.responses_api.request import ResponsesRequest
from ballast.server.text.pieces import OutputPiece
from ballast.server.text.reasoning import KNOWN, ReasoningParser, ReasoningTags
from ballast.server.tools.delta import Arguments, Began, Content, Delta, Thought
from tests.server.tools.test_tools import TOOLS, dialect, written

THINK = KNOWN[0]
HARMONY = KNOWN[-1]


def parsed(parser: ReasoningParser, parts: Sequence[str]) -> tuple[str, str]:
    """The reasoning and the answer; no reasoning follows the answer."""
    found = [d for part in parts for d in parser.push(part)] + parser.flush()
    kinds = [type(d) for d in found]
    assert kinds == sorted(kinds, key=lambda kind: kind is Content)
    assert all(isinstance(d, Content | Thought) and d.text for d in found)
    texts = [[d.text for d in found if isinstance(d, kind)] for kind in (Thought, Content)]
    return "".join(texts[0]), "".join(texts[1])


CASES = [
    # text, whether the prompt opened the reasoning, reasoning, answer
    ("<think>\na b\n</think>\n\nc", False, "a b", "c"),
    (" \n<think>a</think>c", False, "a", "c"),
    ("a b\n</think>\n\nc", True, "a b", "c"),
    ("<think>\n\n</think>\n\nc", False, "", "c"),
    ("\n</think>c", True, "", "c"),
    ("no tags", False, "", "no tags"),
    ("  indented", False, "", "  indented"),
    ("c <think>a</think>", False, "", "c <think>a</think>"),
    ("<think>a <think> b</think>c</think> d", False, "a <think> b", "c</think> d"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("<think>1 < 2 </ 3</think>4", False, "1 < 2 </ 3", "4"),
    ("<thin air", False, "", "<thin air"),
    ("<thi", False, "", "<thi"),
    ("", False, "", ""),
    ("<think>", False, "", ""),
    ("   ", False, "", "   "),
]


@pytest.mark.parametrize(("text", "within", "thought", "answer"), CASES)
def test_it_is_told_apart(text: str, within: bool, thought: str, answer: str) -> None:
    assert parsed(ReasoningParser(THINK, within=within), [text]) == (thought, answer)
    assert parsed(ReasoningParser(THINK, within=within), list(text)) == (thought, answer)


TEXT = st.lists(
    st.sampled_from(("<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "bc")), max_size=12
).map("".join)


@given(TEXT, st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], within: bool
) -> None:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    whole = parsed(ReasoningParser(THINK, within=within), [text])
    assert parsed(ReasoningParser(THINK, within=within), parts) == whole


def test_blanks_without_end_are_not_held_back_without_end() -> None:
    parser = ReasoningParser(THINK, within=True)
    parser.push("a")
    assert (
        sum(len(d.text) for _ in range(100) for d in parser.push("    ") if isinstance(d, Thought))
        > 100
    )


def test_channels_of_gpt_oss() -> None:
    text = "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c"
    assert parsed(HARMONY.parser("<|start|>assistant"), list(text)) == ("a b", "c")
    assert parsed(HARMONY.parser(""), list("<|channel|>final<|message|>c")) == ("", "c")
    assert set(HARMONY.markers) == {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"}


@pytest.mark.parametrize("tags", KNOWN)
def test_tags_are_recognised_by_the_template(tags: ReasoningTags) -> None:
    written = [*tags.closes, *tags.skips][-1]
    template = f"{{% for m in messages %}}{{{{ m.content.split('{written}')[-1] }}}}{{% endfor %}}"
    assert ReasoningTags.of(template) == tags
    assert ReasoningTags.of("{{ messages }}") is None


def test_what_a_checkpoint_declares_comes_first_and_its_patterns_are_not_run() -> None:
    fields: dict[str, Any] = {"thinking": {"open": "<t>\n", "close": ["</t>", "</T>"]}}
    found = ReasoningTags.of("</think>", {"fields": fields})
    assert found == ReasoningTags(("<t>",), ("</t>", "</T>"))
    evil = {"open_pattern": "(a+)+$", "close": "</t>"}
    for declared in (
        evil,
        {"open": "", "close": "x"},
        {"open": "a" * 65, "close": "x"},
        {"open": [1], "close": "x"},
        1,
    ):
        assert ReasoningTags.of("</think>", {"fields": {"thinking": declared}}) == THINK
    for nothing in (None, 1, {"fields": 1}, {"fields": {}}):
        assert ReasoningTags.of("", nothing) is None


@pytest.mark.parametrize(
    ("prompt_end", "within"),
    [
        ("<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
    ],
)
def test_the_prompt_may_have_opened_it(prompt_end: str, within: bool) -> None:
    assert THINK.parser(prompt_end).within is within


# -- in the forms of all APIs -------------------------------------------------------------------


class Characters:
    """A detokenizer of a vocabulary of characters."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class Still(Clock):
    def now(self) -> float:
        return 0.0


class Known:
    """What forms need of a tokenizer here."""


def pieces(
    text: str, *, calls: bool = False, reason: str = "stop"
) -> tuple[list[OutputPiece], Usage]:
    """An output, token by token, and its usage."""
    reader = dialect("hermes").parser(TOOLS) if calls else None
    parser = OutputParser(ReasoningParser(THINK), reader)
    choice = Choice(0, 0, 3, Characters(), StopConditions(), parser=parser)
    made = [choice.add_token(TokenOutput("r", index=i, token=ord(c))) for i, c in enumerate(text)]
    made.append(choice.end(FinishedOutput("r", reason, 3, len(text), 0, 0)))
    return made, Usage.of(3, choice.output_tokens, 0, choice.reasoning_tokens)


REASONED = "<think>\nwhy not\n</think>\n\nyes"


def head() -> Head:
    tokenizer: Any = Known()
    return Head("q", "id", "m", "f", tokenizer, Still(), 0)


def chat_request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], **fields)


def sent(form: Form, text: str, **options: Any) -> list[Any]:
    """The events of a stream."""
    made, usage = pieces(text, **options)
    data = form.opening(1, usage) + b"".join(form.events([p]) for p in made) + form.closing(usage)
    lines = (line.removeprefix("data: ") for line in data.decode().splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def whole(form: Form, text: str, **options: Any) -> Any:
    from ballast.server.http.json_response import encode

    made, usage = pieces(text, **options)
    return json.loads(encode(form.whole(made, 1, usage)))


def test_chat_completions() -> None:
    answer = whole(ChatForm(head(), chat_request()), REASONED)
    ChatCompletion.model_validate(answer)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why not", "yes")
    n = len(">\nwhy not\n</think>")  # from the token that completes the tag
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": n}
    chunks = sent(ChatForm(head(), chat_request(stream=True)), REASONED)
    deltas = [ChatCompletionChunk.model_validate(c).choices[0].delta.to_dict() for c in chunks]
    for name, text in (("reasoning_content", "why not"), ("content", "yes")):
        assert "".join(str(d.get(name) or "") for d in deltas) == text
    assert not any(d.get("content") and d.get("reasoning_content") for d in deltas)


def test_an_answer_without_reasoning_has_no_field_for_it() -> None:
    answer = whole(ChatForm(head(), chat_request()), "yes")
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_calls_follow_reasoning_and_are_not_found_in_it() -> None:
    call = written("hermes", ("now", {}))
    answer = whole(ChatForm(head(), chat_request()), f"<think>{call}</think>{call}", calls=True)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == call
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["now"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_messages() -> None:
    from anthropic.types import Message  # two seconds of imports

    request = MessagesRequest(model="m", max_tokens=99, messages=[{"role": "user", "content": "a"}])
    answer = whole(MessageForm(head(), request), REASONED)
    Message.model_validate(answer)
    assert [b["type"] for b in answer["content"]] == ["thinking", "text"]
    assert answer["content"][0] == {"type": "thinking", "thinking": "why not", "signature": ""}
    events = sent(MessageForm(head(), request), REASONED)
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "why not"
    assert "".join(d.get("text", "") for d in deltas) == "yes"


def responses() -> ResponseForm:
    request = ResponsesRequest(model="m", input="a", reasoning={"effort": "low"})
    return ResponseForm(
        head(), request.chat(), {**request.repeated(), **request.sampled(head().sampling)}
    )


def test_responses() -> None:
    answer = whole(responses(), REASONED)
    made = Response.model_validate(answer)
    assert made.output_text == "yes"
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "why not"}]
    assert answer["reasoning"]["effort"] == "low"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [known.validate_python(e) for e in sent(responses(), REASONED)]
    assert (
        "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "why not"
    )
    assert [e.text for e in events if e.type == "response.reasoning_text.done"] == ["why not"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "yes"


@pytest.mark.parametrize("chats", [True, False])
def test_ollama(chats: bool) -> None:
    def form() -> OllamaForm:
        return OllamaForm(head(), AnswerWriter("m", Still(), Still(), 0.0, chats=chats))

    def texts(answer: Any) -> tuple[str, str]:
        holder = answer["message"] if chats else answer
        return holder.get("thinking", ""), holder.get("content" if chats else "response") or ""

    assert texts(whole(form(), REASONED)) == ("why not", "yes")
    parts = [texts(line) for line in sent(form(), REASONED)]
    assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == ("why not", "yes")


def test_reasoning_that_is_cut_off_is_no_answer() -> None:
    answer = whole(ChatForm(head(), chat_request()), "<think>why", reason="length")
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "")
    request = MessagesRequest(model="m", max_tokens=99, messages=[{"role": "user", "content": "a"}])
    answer = whole(MessageForm(head(), request), "<think>why", reason="length")
    assert [b["type"] for b in answer["content"]] == ["thinking"]


# -- what requests ask for ----------------------------------------------------------------------


def test_each_api_asks_the_template_to_have_the_model_reason_or_not() -> None:
    turn = [{"role": "user", "content": "a"}]

    def messages(**fields: Any) -> dict[str, Any]:
        return (
            MessagesRequest(model="m", max_tokens=9, messages=turn, **fields)
            .chat()
            .template_variables
        )

    assert chat_request().template_variables == {}
    assert chat_request(reasoning_effort="none").template_variables["enable_thinking"] is False
    assert chat_request(
        reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}
    ).template_variables == {"enable_thinking": False, "reasoning_effort": "low"}
    assert messages() == {}
    assert messages(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert messages(thinking={"type": "enabled", "budget_tokens": 1024}) == {
        "enable_thinking": True
    }
    asked = ResponsesRequest(model="m", input="a", reasoning={"effort": "none"}).chat()
    assert asked.template_variables["enable_thinking"] is False


def test_reasoning_that_comes_back_reaches_the_template() -> None:
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    turn = {"role": "assistant", "content": blocks}
    request = MessagesRequest(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "a"}, turn]
    )
    made = request.chat().messages[-1].for_template()
    assert made == {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    chat = ChatRequest(model="m", messages=[turn])
    assert chat.messages[0].for_template() == made


def deltas_of(text: str) -> Iterator[Delta]:
    parser = OutputParser(ReasoningParser(THINK), dialect("hermes").parser(TOOLS))
    for character in text:
        yield from parser.push(character)
    yield from parser.flush()


def test_order_is_kept() -> None:
    call = written("hermes", ("now", {}))
    found = list(deltas_of(f"<think>a</think>b{call}"))
    assert isinstance(found[0], Thought)
    assert isinstance(found[1], Content)
    assert all(isinstance(d, Began | Arguments) for d in found[2:])
