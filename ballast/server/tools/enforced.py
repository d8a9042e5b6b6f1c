"""Grammars that leave a model no choice but to call a function, in the syntax of its family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ballast.server.tools.request import Function
from ballast.server.tools.syntax import ARGUMENTS, NAME, Syntax


def calls_grammar(
    syntax: Syntax, functions: Sequence[Function], parallel: bool, tokens: Mapping[str, int]
) -> str:
    """Lark as llguidance knows it: one call of one of `functions`, or several of them.

    Arguments follow the functions' schemas. `tokens`: markers that are tokens, with ids. They
    have to be named by them: llguidance takes `<tool_call>` for special whether it is or not.
    """
    rules = ["%llguidance {}"]
    more = f"({_written(syntax.between, tokens)} call)*" if parallel else ""
    begin, end = _written(syntax.begin, tokens), _written(syntax.end, tokens)
    rules.append(f"start: {begin} call {more} {end}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        before, after = syntax.call.split(ARGUMENTS)
        before = before.replace(NAME, function.name)
        rules.append(
            f"call_{i}: {_written(before, tokens)} arguments_{i} {_written(after, tokens)}"
        )
        if syntax.python:
            rules += _keywords(f"arguments_{i}", function.schema)
        else:
            rules.append(f"arguments_{i}: %json {json.dumps(function.schema)}")
    return "\n".join(rules) + "\n"


def _written(text: str, tokens: Mapping[str, int]) -> str:
    """Literal text, with markers that are tokens by their ids."""
    if not tokens:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    return " ".join(f"<[{tokens[p]}]>" if p in tokens else json.dumps(p) for p in parts if p)


def _keywords(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Rules for keyword arguments in the schema's order; those not required may be left out."""
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    properties = {**properties, **{key: True for key in required if key not in properties}}
    shared = {k: schema[k] for k in ("$defs", "definitions", "x-guidance") if k in schema}
    # `first` stands before any argument was written, `after` behind one.
    rules = [f"{rule}: {rule}_first_0"]
    for i, (name, kind) in enumerate(properties.items()):
        rest = f"{rule}_after_{i + 1}"
        given = f"{json.dumps(name + '=')} {rule}_value_{i} {rest}"
        left_out = "" if name in required else f" | {rest}"
        skipped = "" if name in required else f" | {rule}_first_{i + 1}"
        rules.append(f"{rule}_first_{i}: {given}{skipped}")
        rules.append(f'{rule}_after_{i}: ", " {given}{left_out}')
        rules.append(f"{rule}_value_{i}: {_literal(kind, shared)}")
    rules.append(f'{rule}_first_{len(properties)}: ""')
    rules.append(f'{rule}_after_{len(properties)}: ""')
    return rules


def _literal(schema: object, shared: Mapping[str, Any]) -> str:
    if not isinstance(schema, Mapping):
        schema = {}
    if schema.get("type") == "boolean":
        return '"True" | "False"'
    return f"%json {json.dumps({**schema, **shared})}"
