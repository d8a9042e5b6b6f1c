"""Calls as model families write them: read back, however the text is cut, and losing nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import ConfigError, InvalidRequest
from ballast.server.tools.delta import Arguments, Began, Content, Delta
from ballast.server.tools.dialect import ToolDialect
from ballast.server.tools.request import Tools
from ballast.server.tools.syntax import SYNTAXES

Call = tuple[str, str]
WEATHER = {"city": 'Köln "am" Rhein', "days": [1, 2.5, None, True], "deep": {"a": {"}": "]"}}}


def tool(name: str, **properties: object) -> dict[str, object]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def odd(parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "odd", "parameters": parameters}}


TOOLS = Tools.of([tool("weather"), tool("now")])
assert TOOLS is not None


def dialect(name: str) -> ToolDialect:
    found = ToolDialect.of("", name, lambda marker: None)
    assert found is not None
    return found


def written(name: str, *calls: tuple[str, object]) -> str:
    """What a model of this dialect writes."""
    mark = {
        "calls": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "call": "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "sep": "<\uff5ctool\u2581sep\uff5c>",
        "call_end": "<\uff5ctool\u2581call\u2581end\uff5c>",
        "end": "<\uff5ctool\u2581calls\u2581end\uff5c>",
    }
    objects = [json.dumps({"name": n, "arguments": a}) for n, a in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)
        case "llama3":
            return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "mistral-args":
            return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
        case "granite":
            return f"<|tool_call|>[{', '.join(objects)}]"
        case "phi4-mini":
            return f"<|tool_call|>[{', '.join(objects)}]<|/tool_call|>"
        case "deepseek-v3":
            inner = "\n".join(
                f"{mark['call']}function{mark['sep']}{n}\n```json\n{json.dumps(a)}\n```"
                f"{mark['call_end']}"
                for n, a in calls
            )
            return mark["calls"] + inner + mark["end"]
        case "deepseek-v3.1":
            inner = "".join(
                f"{mark['call']}{n}{mark['sep']}{json.dumps(a)}{mark['call_end']}" for n, a in calls
            )
            return mark["calls"] + inner + mark["end"]
        case "pythonic":
            spelled = (
                f"{n}({', '.join(f'{k}={v!r}' for k, v in dict(a).items())})"  # type: ignore[call-overload]
                for n, a in calls
            )
            return f"[{', '.join(spelled)}]"
    raise AssertionError(name)


def read(name: str, parts: Iterable[str]) -> tuple[str, list[Call]]:
    """(content, calls) of an output that comes in these parts."""
    assert TOOLS is not None
    parser = dialect(name).parser(TOOLS)
    deltas: list[Delta] = [d for part in parts for d in parser.push(part)] + parser.flush()
    content, names, arguments = "", list[str](), list[str]()
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Began(index, call_id, called):
                assert index == len(names)
                assert call_id
                names.append(called)
                arguments.append("")
            case Arguments(index, fragment):
                assert index == len(names) - 1
                arguments[index] += fragment
    assert parser.calls == len(names)
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_are_read_back(name: str) -> None:
    """One call, several, without arguments: whole and character by character."""
    for calls in [[("weather", WEATHER)], [("now", {}), ("weather", WEATHER), ("now", {})]]:
        text = written(name, *calls)
        for parts in [[text], list(text)]:
            content, found = read(name, parts)
            assert not content
            assert [(n, json.loads(a)) for n, a in found] == calls


@pytest.mark.parametrize(
    "name", [n for n in SYNTAXES if SYNTAXES[n].opens and not SYNTAXES[n].bare]
)
def test_content_around_calls(name: str) -> None:
    text = "Let me see [1].\n" + written(name, ("now", {})) + "\nSo <it> is."
    content, calls = read(name, [text])
    assert content == "Let me see [1].\n\nSo <it> is."
    assert calls == [("now", "{}")]


@pytest.mark.parametrize("name", SYNTAXES)
def test_arguments_come_as_they_grow(name: str) -> None:
    """The name is there before the arguments are; content passes at once."""
    assert TOOLS is not None
    text = written(name, ("weather", {"city": "Rom", "days": 3}))
    parser = dialect(name).parser(TOOLS)
    deltas = parser.push(text[: text.index("days")])
    assert isinstance(deltas[0], Began)
    assert isinstance(deltas[1], Arguments)
    assert "Rom" in deltas[1].fragment
    assert dialect(name).parser(TOOLS).push("It rains") == [Content("It rains")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>now</tool_call>"),
        ("hermes", '<tool_call>{"name": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", "a <tool_cal"),
        ("llama3", '{"name": "Ada", "parameters": {}}'),
        ("llama3", '{"answer": {"name": "now"}}'),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS] []"),
        ("deepseek-v3", "<\uff5ctool\u2581calls\u2581begin\uff5c>"),
        ("pythonic", "[1] says so"),
        ("pythonic", "[open(file=1)]"),
        ("pythonic", "[now(1)]"),
        *((name, " \n ") for name in SYNTAXES),
    ],
)
def test_no_call_is_content(name: str, text: str) -> None:
    assert read(name, [text]) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}', [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_', [("f", "{}")]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f"}', [("f", "{}")]),
        ("llama3", '[{"name": "now", "parameters": {}}]', [("now", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]x9[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
        ("mistral-args", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', [("f", "{}")]),
        ("phi4-mini", 'functools[{"name": "f", "arguments": {}}]', [("f", "{}")]),
        ("pythonic", "[now(a=true, b='x)')]", [("now", '{"a": true, "b": "x)"}')]),
        ("pythonic", "[now(c={1, 2})]", [("now", '{"c": "{1, 2}"}')]),
        ("pythonic", "[now(a=1, b=", [("now", '{"a": 1')]),
    ],
)  # fmt: skip
def test_what_models_also_write(name: str, text: str, calls: list[Call]) -> None:
    assert read(name, list(text)) == ("", calls)


_PIECES = st.sampled_from(
    [
        *(m for s in SYNTAXES.values() for m in (*s.opens, *s.closes)),
        *(written(n, ("now", {}), ("weather", {"a": "b"})) for n in SYNTAXES),
        *'[]{}(),:;"\\=<|>', '"name"', '"arguments"', "now", "now(", " ", "\n", "word ", "{}",
    ]
)  # fmt: skip


@given(st.sampled_from(list(SYNTAXES)), st.lists(_PIECES, max_size=12), st.data())
def test_cuts_do_not_matter(name: str, pieces: list[str], data: st.DataObject) -> None:
    """Any text, cut anyhow, reads like the whole."""
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, parts) == read(name, [text])


@given(st.sampled_from(list(SYNTAXES)), st.lists(_PIECES, max_size=12))
def test_nothing_is_lost(name: str, pieces: list[str]) -> None:
    """A text without calls comes out as it went in."""
    text = "".join(pieces)
    content, calls = read(name, [text])
    if not calls:
        assert content == text


def test_ids() -> None:
    """Mistral's templates refuse others than nine letters and digits."""
    assert TOOLS is not None
    for name, size in (("hermes", 29), ("mistral", 9)):
        began = dialect(name).parser(TOOLS).push(written(name, ("now", {})))[0]
        assert isinstance(began, Began)
        assert len(began.id) == size


def test_unknown_dialect() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        dialect("klingon")


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("x", None, "tools"),
        ([1], None, "tools.0.type"),
        ([{"type": "function"}], None, "tools.0.function"),
        ([tool("a b")], None, "tools.0.function.name"),
        ([tool("a"), tool("a")], None, "tools"),
        ([tool("a"), odd({"type": "string"})], None, "tools.1.function.parameters"),
        ([tool("a")], "some", "tool_choice"),
        ([tool("a")], {"type": "function", "function": {"name": "b"}}, "tool_choice.function.name"),
        ([tool("a")], {"type": "function"}, "tool_choice.function.name"),
        ([tool("a")], 3, "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_bad_fields_are_named(tools: object, choice: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Tools.of(tools, choice)
    assert caught.value.param == param


def test_no_tools() -> None:
    assert Tools.of(None) is None
    assert Tools.of([]) is None
    assert Tools.of(None, "none") is None
    assert Tools.of([tool("a")], "none") is None
