"""Chat templates of model families, shortened to how they write calls: told apart, and what a
template writes for an earlier call is what the parser reads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.tools.delta import Arguments, Began
from ballast.server.tools.dialect import ToolDialect
from ballast.server.tools.request import Tools
from ballast.server.tools.syntax import SYNTAXES

SHOWN = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
CALLS = "{% for message in messages if message.role == 'assistant' %}@"
LOOP = "{% for call in message.tool_calls %}"
DEEPSEEK = tuple(
    f"<\uff5ctool\u2581{w}\uff5c>"
    for w in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
BEGIN, CALL, SEP, CALL_END, END = DEEPSEEK

TEMPLATES = {
    "hermes": (
        "{% if tools %}<tools>" + SHOWN + "</tools>\nwithin <tool_call></tool_call>{% endif %}"
        + CALLS + "{{ message.content }}" + LOOP +
        "{% set f = call.function %}\n<tool_call>\n{\"name\": \"{{ f.name }}\", \"arguments\": "
        "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}"
    ),
    "llama3": (
        "{% if tools %}Environment: ipython\nRespond in the format {\"name\": function name, "
        "\"parameters\": dictionary of argument name and its value}." + SHOWN + "{% endif %}"
        + CALLS + "{% set f = message.tool_calls[0].function %}"
        "{\"name\": \"{{ f.name }}\", \"parameters\": {{ f.arguments | tojson }}}{% endfor %}"
    ),
    "mistral": (
        "[AVAILABLE_TOOLS]" + SHOWN + "[/AVAILABLE_TOOLS]" + CALLS + "[TOOL_CALLS] [" + LOOP +
        "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{% endfor %}"
    ),
    "mistral-args": (
        "[AVAILABLE_TOOLS]" + SHOWN + "[/AVAILABLE_TOOLS]" + CALLS + LOOP +
        "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
        "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    ),
    "granite": (
        "{% if tools %}respond with <|tool_call|> followed by a JSON list of tools used."
        + SHOWN + "{% endif %}" + CALLS + "<|tool_call|>[" + LOOP +
        "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{% endfor %}"
    ),
    "phi4-mini": (
        "{% for m in messages if m.role == 'system' %}{% if 'tools' in m and m['tools'] %}"
        "{{ m.content + '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}{% endfor %}"
        + CALLS + "<|tool_call|>[" + LOOP +
        "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}"
        "{% endfor %}]<|/tool_call|>{% endfor %}"
    ),
    "deepseek-v3": (
        "{% if tools %}" + SHOWN + "{% endif %}" + CALLS + BEGIN + LOOP +
        CALL + "{{ call.type }}" + SEP + "{{ call.function.name }}\n```json\n"
        "{{ call.function.arguments | tojson }}\n```" + CALL_END + "{% endfor %}" + END +
        "{% endfor %}"
    ),
    "deepseek-v3.1": (
        "{% if tools %}" + SHOWN + "{% endif %}" + CALLS + BEGIN + LOOP +
        CALL + "{{ call.function.name }}" + SEP +
        "{{ call.function.arguments }}" + CALL_END + "{% endfor %}" + END + "{% endfor %}"
    ),
    "pythonic": (
        "{% if tools %}Use exact format: [func_name1(param1=value1, param2=value2), "
        "func_name2(...)]" + SHOWN + "{% endif %}" + CALLS + "[" + LOOP +
        "{{ call.function.name }}({% for p in call.function.arguments %}{{ p }}="
        "{{ call.function.arguments[p] | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% endfor %}"
    ),
}  # fmt: skip
OTHERS = {
    "no tools": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "tools of no known dialect": "{% for tool in tools %}{{ tool }}{% endfor %}",
    "qwen 3 coder": "{% for tool in tools %}<tool_call><function=f>{% endfor %}",
    "glm": "{% for tool in tools %}<tool_call>f<arg_key>{% endfor %}",
}

TOOLS = [{"type": "function", "function": {"name": n}} for n in ("forecast", "now")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["some text"], 300, 64)


def called(*calls: tuple[str, object]) -> dict[str, object]:
    """What a client sends back: arguments are text."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call{i:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_is_read(tokenizer: Any, name: str) -> None:
    dialect = ToolDialect.of(TEMPLATES[name], "auto", lambda text: None)
    tools = Tools.of(TOOLS)
    assert dialect is not None
    assert dialect.name == name
    assert tools is not None
    calls: list[tuple[str, object]] = [("forecast", {"city": "Rom", "days": [1, 2]}), ("now", {})]
    if name == "llama3":
        calls = calls[:1]  # its template writes no more
    messages: list[dict[str, object]] = [{"role": "user", "content": "?"}, called(*calls)]
    text = tokenizer.apply_chat_template(
        dialect.conversation(messages, TOOLS),
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        tokenize=False,
    )
    assert '"forecast"' in text.partition("@")[0]  # the tools were shown
    parser = dialect.parser(tools)
    deltas = [*parser.push(text.partition("@")[2]), *parser.flush()]
    assert [d.name for d in deltas if isinstance(d, Began)] == [n for n, _ in calls]
    found = [json.loads(d.fragment) for d in deltas if isinstance(d, Arguments)]
    assert found == [arguments for _, arguments in calls]


@pytest.mark.parametrize("why", OTHERS)
def test_to_other_models_calls_are_described(why: str) -> None:
    dialect = ToolDialect.of(OTHERS[why], "auto", lambda text: None)
    assert dialect is not None
    assert dialect.described
    text = dialect.description(TOOLS)
    tools = Tools.of(TOOLS)
    assert tools is not None
    assert text.index('"forecast"') < text.index('"now"') < text.index("<tool_call>")
    call = dialect.written(called(("now", {"at": "noon"}))["tool_calls"])  # type: ignore[arg-type]
    parser = dialect.parser(tools)
    deltas = [*parser.push(call), *parser.flush()]
    assert [d.name for d in deltas if isinstance(d, Began)] == ["now"]
    named = ToolDialect.of(OTHERS[why], "hermes", lambda text: None)
    assert named is not None
    assert (named.name, named.described) == ("hermes", False)


def test_without_a_template_there_is_no_dialect() -> None:
    assert ToolDialect.of("", "auto", lambda text: None) is None


@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_are_written_as_they_are_read(name: str) -> None:
    dialect = ToolDialect.of("", name, lambda text: None)
    tools = Tools.of(TOOLS)
    assert dialect is not None
    assert tools is not None
    calls: list[tuple[str, object]] = [("forecast", {"city": "Rom", "days": [1, 2]}), ("now", {})]
    parser = dialect.parser(tools)
    text = dialect.written(called(*calls)["tool_calls"])  # type: ignore[arg-type]
    deltas = [*parser.push(text), *parser.flush()]
    assert [d.name for d in deltas if isinstance(d, Began)] == [n for n, _ in calls]
    found = [json.loads(d.fragment) for d in deltas if isinstance(d, Arguments)]
    assert found == [arguments for _, arguments in calls]


def test_ids_of_calls_are_as_mistrals_templates_need_them() -> None:
    """A client goes on with what another server answered."""
    dialect = ToolDialect.of(TEMPLATES["mistral"], "auto", lambda text: None)
    assert dialect is not None
    call = called(("now", {}))
    ours = {"role": "tool", "content": "noon", "tool_call_id": "call00000"}
    assert dialect.conversation([ours], None) == [ours]
    call["tool_calls"][0]["id"] = "toolu_01A"  # type: ignore[index]
    result = {"role": "tool", "content": "noon", "tool_call_id": "toolu_01A"}
    turn, answer = dialect.conversation([call, result], None)
    assert turn["tool_calls"][0]["id"] == answer["tool_call_id"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", answer["tool_call_id"])


@pytest.mark.parametrize("arguments", ["", "{", "null", {"a": 1}, None, "[" * 50_000])
def test_any_arguments_of_earlier_calls(arguments: object) -> None:
    """Models write what they like, and clients send it back."""
    dialect = ToolDialect.of("", "hermes", lambda text: None)
    assert dialect is not None
    call = {"function": {"name": "f", "arguments": arguments}}
    several: list[object] = [[call], [{"function": None}], [1], "x", None]
    for calls in several:
        message: dict[str, object] = {"role": "assistant", "tool_calls": calls}
        [turn] = dialect.conversation([message], None)
        assert turn["role"] == "assistant"
