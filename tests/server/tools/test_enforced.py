"""Grammars of enforced calls: as long as they must be, and no longer than they may be."""

from __future__ import annotations

from typing import Any

import pytest

from ballast.core.errors import InvalidRequest
from ballast.server.tools.dialect import ToolDialect
from ballast.server.tools.enforced import MOST_GRAMMAR, calls_grammar
from ballast.server.tools.request import Tools
from ballast.server.tools.syntax import SYNTAXES


def tools(parameters: Any) -> Tools:
    function = {"name": "f", "parameters": parameters}
    found = Tools.of([{"type": "function", "function": function}], "required")
    assert found is not None
    return found


def grammar(parameters: Any) -> str:
    return calls_grammar(SYNTAXES["pythonic"], tools(parameters).functions, False, {})


def test_what_no_argument_refers_to_is_left_out() -> None:
    schema = {
        "properties": {
            "plain": {"type": "integer"},
            "direct": {"$ref": "#/$defs/a~1b"},
            "within": {"type": "array", "items": [{"$ref": "#/$defs/loop"}]},
            "older": {"$ref": "#/definitions/old"},
            "nowhere": {"$ref": "#/$defs/none"},
        },
        "$defs": {
            "a/b": {"enum": ["DIRECT"], "$ref": "#/$defs/more%20"},
            "more ": {"enum": ["MORE"]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"enum": ["LOOP"]}]},
            "unused": {"enum": ["UNUSED"]},
        },
        "definitions": {"old": {"enum": ["OLD"]}},
    }
    lines = grammar(schema).splitlines()
    found = {
        name: [mark for mark in ("DIRECT", "MORE", "LOOP", "UNUSED", "OLD") if mark in line]
        for i, name in enumerate(schema["properties"])
        for line in lines
        if line.startswith(f"arguments_0_value_{i}:")
    }
    assert found == {
        "plain": [],
        "direct": ["DIRECT", "MORE"],
        "within": ["LOOP"],
        "older": ["OLD"],
        "nowhere": [],
    }


def test_a_schema_that_many_arguments_share_does_not_multiply() -> None:
    """250 KB for each of a thousand arguments would be 250 MB."""
    large = {"enum": ["x" * 1000] * 200}
    many = {f"p{i}": {"$ref": "#/$defs/large"} for i in range(1000)}
    with pytest.raises(InvalidRequest, match=f"longer than {MOST_GRAMMAR}"):
        grammar({"properties": many, "$defs": {"large": large}})
    unused = grammar({"properties": {name: {} for name in many}, "$defs": {"large": large}})
    assert len(unused) < MOST_GRAMMAR


def test_what_is_shared_is_enforced() -> None:
    dialect = ToolDialect.of("", "pythonic", lambda marker: None)
    assert dialect is not None
    schema = {
        "properties": {"a": {"$ref": "#/$defs/one"}},
        "required": ["a"],
        "$defs": {"one": {"enum": ["only"]}},
    }
    assert "only" in dialect.grammar(tools(schema))


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"properties": 5}, "tools.0.function.parameters.properties"),
        ({"properties": ["a"]}, "tools.0.function.parameters.properties"),
        ({"required": 5}, "tools.0.function.parameters.required"),
        ({"required": [["a"]]}, "tools.0.function.parameters.required"),
    ],
)
def test_a_schema_that_is_none_is_named(schema: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(schema)
    assert caught.value.param == param
