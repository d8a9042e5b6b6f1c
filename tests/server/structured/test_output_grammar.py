"""What clients ask outputs to follow: refused by name, or enforced; and never a way to hang."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from ballast.core.errors import InvalidRequest
from ballast.fleet.tokenizer import train_tokenizer
from ballast.server.structured.grammar import of_response_format, of_structured_outputs
from ballast.server.structured.grammar_check import TOO_COMPLICATED
from ballast.server.tools.delta import Arguments, Began
from ballast.server.tools.dialect import ToolDialect
from ballast.server.tools.request import Tools
from ballast.server.tools.syntax import SYNTAXES

MARKERS = sorted({m for s in SYNTAXES.values() for m in s.markers})

PLACE = {"type": "object", "properties": {"lat": {"type": "integer"}}, "required": ["lat"]}
CITY: dict[str, Any] = {"enum": ["Rom", 'K"ln']}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": CITY,
        "place": {"$ref": "#/$defs/place"},
        "sure": {"type": "boolean"},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["sure", "place"],
    "additionalProperties": False,
    "$defs": {"place": {**PLACE, "additionalProperties": False}},
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def format_of(schema: object, strict: object = None) -> dict[str, object]:
    form = {"name": "x", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": form}


def trained(special: bool) -> Any:
    """A real tokenizer, to which the markers of all dialects are tokens, `special` ones or not."""
    texts = ['{"name": "forecast", "arguments": {}}\n', "plain words [f(a=1)]"]
    made = train_tokenizer(texts, 400, 64)
    made.add_tokens(MARKERS, special_tokens=special)
    return made


@pytest.fixture(scope="module")
def tokenizers() -> dict[bool, Any]:
    """By whether markers are special."""
    return {special: trained(special) for special in (True, False)}


@pytest.fixture(scope="module")
def tokenizer(tokenizers: dict[bool, Any]) -> Any:
    """The one with special markers."""
    return tokenizers[True]


def walk(tokenizer: Any, grammar: str, seed: int) -> str:
    """An output of which the grammar decides everything that chance does not."""
    chance = random.Random(seed)
    made = from_tokenizer(tokenizer)
    matcher = LLMatcher(made, grammar)
    output: list[int] = []
    for _ in range(2000):
        assert not matcher.is_error(), matcher.get_error()
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(made.vocab_size) if bits[i >> 3] >> (i & 7) & 1]
        at_end = tokenizer.eos_token_id in allowed
        if at_end and (len(allowed) == 1 or chance.random() < 0.5):
            return str(tokenizer.decode(output, clean_up_tokenization_spaces=False))
        output.append(chance.choice([i for i in allowed if i != tokenizer.eos_token_id]))
        matcher.consume_token(output[-1])
    raise AssertionError(tokenizer.decode(output))


def follows(value: Any) -> bool:
    """Whether a value follows SCHEMA."""
    return (
        isinstance(value, dict)
        and {"sure", "place"} <= set(value) <= set(SCHEMA["properties"])
        and isinstance(value["sure"], bool)
        and list(value["place"]) == ["lat"]
        and isinstance(value["place"]["lat"], int)
        and value.get("city", "Rom") in CITY["enum"]
        and all(isinstance(day, int) for day in value.get("days", []))
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_is_followed(tokenizer: Any, seed: int) -> None:
    text = walk(tokenizer, of_response_format(format_of(SCHEMA, True)), seed)
    assert follows(json.loads(text)), text


@pytest.mark.parametrize(
    ("choice", "special", "seed"),
    [("required", True, 0), ("required", False, 1), ("forecast", True, 2), ("forecast", False, 0)],
)
@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_are_enforced(
    tokenizers: dict[bool, Any], name: str, choice: str, special: bool, seed: int
) -> None:
    """Whatever else a model would say, it says calls of what is offered, and they are read back."""
    tokenizer = tokenizers[special]
    ids = dict(zip(MARKERS, tokenizer.convert_tokens_to_ids(MARKERS), strict=True))
    dialect = ToolDialect.of("", name, ids.get)
    assert dialect is not None
    named = {"type": "function", "function": {"name": choice}}
    tools = Tools.of(TOOLS, choice if choice == "required" else named)
    assert tools is not None
    text = walk(tokenizer, dialect.grammar(tools), seed)
    parser = dialect.parser(tools)
    deltas = [*parser.push(text), *parser.flush()]
    names = [d.name for d in deltas if isinstance(d, Began)]
    assert names, text
    assert set(names) <= {"forecast", "now"}
    assert choice == "required" or names == [choice]
    assert all(isinstance(d, Began | Arguments) for d in deltas), text
    for delta in deltas:
        if isinstance(delta, Arguments):
            value = json.loads(delta.fragment)
            assert follows(value) if names[delta.index] == "forecast" else value == {}, text


def test_marker_tokens(tokenizer: Any) -> None:
    ids = dict(zip(MARKERS, tokenizer.convert_tokens_to_ids(MARKERS), strict=True))
    dialect = ToolDialect.of("", "mistral-args", ids.get)
    assert dialect is not None
    assert set(dialect.marker_tokens) == {"[TOOL_CALLS]", "[ARGS]"}


def test_more_choices_than_a_parsers_row_has_room_for_can_be_followed() -> None:
    made = of_structured_outputs({"choice": [f"choice {i}" for i in range(2500)]})
    matcher = LLMatcher(LLTokenizer("byte"), made, log_level=0)
    assert matcher.consume_tokens(list(b"choice 2499")), matcher.get_error()
    assert matcher.is_accepting()
    assert matcher.is_stopped()


def test_free_choice_has_no_grammar() -> None:
    tools = Tools.of(TOOLS)
    dialect = ToolDialect.of("", "hermes", lambda text: None)
    assert dialect is not None
    assert tools is not None
    assert dialect.grammar(tools) == ""


def test_schema_of_a_function_is_named() -> None:
    wrong = {"type": "object", "properties": {"x": {"type": "thing"}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": wrong}}
    dialect = ToolDialect.of("", "hermes", lambda text: None)
    tools = Tools.of([*TOOLS, bad], "required")
    assert dialect is not None
    assert tools is not None
    with pytest.raises(InvalidRequest) as caught:
        dialect.grammar(tools)
    assert caught.value.param == "tools.2.function.parameters"


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_plain_text_has_no_grammar(value: object) -> None:
    assert of_response_format(value) == ""


def test_json_object(tokenizer: Any) -> None:
    matcher = LLMatcher(from_tokenizer(tokenizer), of_response_format({"type": "json_object"}))
    assert not matcher.validate_tokens(tokenizer.encode("[1]"))
    ids = tokenizer.encode('{"a":[1,null],"b":{"c":"d e"}}')
    assert matcher.validate_tokens(ids) == len(ids)


COMPACT, SPACED, INDENTED = '{"a":1,"b":[2]}', '{"a": 1, "b": [2]}', '{\n\t"a": 1,\n\t"b": [2]\n}'


@pytest.mark.parametrize(
    ("spacing", "allowed"),
    [
        ({}, [COMPACT]),
        ({"disable_any_whitespace": True}, [COMPACT]),
        ({"disable_any_whitespace": False}, [COMPACT, SPACED, INDENTED]),
        ({"whitespace_pattern": " ?"}, [COMPACT, SPACED]),
    ],
)
@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_json_is_compact_unless_a_request_allows_white_space(
    tokenizer: Any, spacing: dict[str, object], allowed: list[str], kind: str
) -> None:
    schema = {"json": {"type": "object"}, "json_object": True}[kind]
    grammar = of_structured_outputs({kind: schema, **spacing})
    for text in (COMPACT, SPACED, INDENTED):
        ids = tokenizer.encode(text)
        matcher = LLMatcher(from_tokenizer(tokenizer), grammar)
        assert (matcher.validate_tokens(ids) == len(ids)) == (text in allowed), text


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json", "type"),
        ({}, "type"),
        ({"type": []}, "type"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": 1}, "json_schema"),
        (format_of({}, "yes"), "json_schema.strict"),
        (format_of("x"), "json_schema.schema"),
        (format_of(False), "json_schema.schema"),
        (format_of({"type": "thing"}), "json_schema.schema"),
        (format_of({"type": "string", "enum": [1]}), "json_schema.schema"),
        (format_of({"$ref": "#"}), "json_schema.schema"),
        (format_of({"$ref": "http://127.0.0.1/x"}), "json_schema.schema"),
        (format_of({"const": float("nan")}), "json_schema.schema"),
        (format_of({"const": "\ud800"}), "json_schema.schema"),
        (format_of({"not": {}}, True), "json_schema.schema"),
        (format_of({"description": "x" * 300_000}), "json_schema.schema"),
    ],
)
def test_bad_formats_are_named(value: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_response_format(value)
    assert caught.value.param == f"response_format.{param}"


def test_hostile_schemas() -> None:
    """What hangs llguidance, or takes our stack, is refused; and the next one is served."""
    deep: dict[str, object] = {}
    for _ in range(50_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="deeper"):
        of_response_format(format_of(deep))
    ambiguous = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 25)]
    with pytest.raises(InvalidRequest, match=TOO_COMPLICATED):
        of_response_format(format_of({"allOf": ambiguous}))
    doubling = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60))
    with pytest.raises(InvalidRequest, match=TOO_COMPLICATED):
        of_structured_outputs({"grammar": doubling + '\nA60: "x"'})
    assert of_response_format(format_of(SCHEMA))


@pytest.mark.parametrize(
    ("value", "outputs"),
    [
        ({"json": {"enum": [17]}}, {"17"}),
        ({"json": '{"enum": [17]}'}, {"17"}),
        ({"regex": "a{2}b?", "json": None}, {"aa", "aab"}),
        ({"choice": ["yes", 'n"o/\n', "\u00e9\U0001f600"]}, {"yes", 'n"o/\n', "\u00e9\U0001f600"}),
        ({"grammar": 'start: "x" ("y" | "z")'}, {"xy", "xz"}),
    ],
)
def test_structured_outputs(tokenizer: Any, value: object, outputs: set[str]) -> None:
    grammar = of_structured_outputs(value)
    assert {walk(tokenizer, grammar, seed) for seed in range(8)} <= outputs
    assert of_structured_outputs(None) == ""


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("x", ""),
        ({}, ""),
        ({"json": {}, "regex": "a"}, ""),
        ({"toml": "x"}, ".toml"),
        ({"regex": "("}, ".regex"),
        ({"regex": 1}, ".regex"),
        ({"regex": "\ud800"}, ".regex"),
        ({"grammar": "\ud800"}, ".grammar"),
        ({"choice": []}, ".choice"),
        ({"choice": [""]}, ".choice"),
        ({"choice": ["\ud800"]}, ".choice"),
        ({"grammar": "start: <|nowhere|>"}, ".grammar"),
        ({"json": "{"}, ".json"),
        ({"json": {}, "disable_any_whitespace": "no"}, ".disable_any_whitespace"),
        ({"json": {}, "whitespace_pattern": 1}, ".whitespace_pattern"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            ".whitespace_pattern",
        ),
        ({"regex": "a", "whitespace_pattern": " "}, ".whitespace_pattern"),
        ({"json": "[" * 100_000}, ".json"),
    ],
)
def test_bad_structured_outputs_are_named(value: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_structured_outputs(value)
    assert caught.value.param == "structured_outputs" + param
