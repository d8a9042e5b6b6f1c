"""Build grammars that force the model to call a function, in the tool-call syntax of its family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ballast.core.errors import InvalidRequest
from ballast.server.structured.grammar import MOST_TEXT
from ballast.server.tools.request import Function
from ballast.server.tools.syntax import ARGUMENTS, NAME, Syntax

MOST_GRAMMAR = 4 * MOST_TEXT
"""Most characters of a grammar: it may repeat shared parts of a schema many times."""
_SHARED = ("$defs", "definitions")
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]*)")


def calls_grammar(
    syntax: Syntax, functions: Sequence[Function], parallel: bool, tokens: Mapping[str, int]
) -> str:
    """Build a grammar (llguidance's Lark) of one call of one of `functions`, or, if `parallel`, of
    several.

    Arguments follow the functions' schemas. `tokens`: ids of the markers that are single tokens.
    The grammar must name these by id: llguidance takes `<tool_call>` for special whether it is or
    not. Raises InvalidRequest where the grammar would be longer than `MOST_GRAMMAR`.
    """
    rules, size = [], 0
    for rule in _rules(syntax, functions, parallel, tokens):
        rules.append(rule)
        size += len(rule) + 1
        if size > MOST_GRAMMAR:
            why = f"the grammar of their calls is longer than {MOST_GRAMMAR} characters"
            raise InvalidRequest(f"tools: {why}", "tools")
    return "\n".join(rules) + "\n"


def _rules(
    syntax: Syntax, functions: Sequence[Function], parallel: bool, tokens: Mapping[str, int]
) -> Iterator[str]:
    yield "%llguidance {}"
    more = f"({_written(syntax.between, tokens)} call)*" if parallel else ""
    begin, end = _written(syntax.begin, tokens), _written(syntax.end, tokens)
    yield f"start: {begin} call {more} {end}"
    yield "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))
    for i, function in enumerate(functions):
        before, after = syntax.call.split(ARGUMENTS)
        before = before.replace(NAME, function.name)
        yield f"call_{i}: {_written(before, tokens)} arguments_{i} {_written(after, tokens)}"
        if syntax.python:
            yield from _keywords(f"arguments_{i}", function)
        else:
            yield f"arguments_{i}: %json {json.dumps(function.schema)}"


def _written(text: str, tokens: Mapping[str, int]) -> str:
    """Write literal text as Lark, markers that are tokens by their ids."""
    if not tokens:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    return " ".join(f"<[{tokens[p]}]>" if p in tokens else json.dumps(p) for p in parts if p)


def _keywords(rule: str, function: Function) -> Iterator[str]:
    """Yield rules for keyword arguments in the schema's order; those not required may be left out.
    Raises InvalidRequest."""
    schema = function.schema
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidRequest("properties are an object", f"{function.param}.properties")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise InvalidRequest("required is a list of texts", f"{function.param}.required")
    properties = {**properties, **{key: True for key in required if key not in properties}}
    shared = _Shared(schema)
    # `first` stands before any argument was written, `after` behind one.
    yield f"{rule}: {rule}_first_0"
    for i, (name, kind) in enumerate(properties.items()):
        rest = f"{rule}_after_{i + 1}"
        given = f"{json.dumps(name + '=')} {rule}_value_{i} {rest}"
        left_out = "" if name in required else f" | {rest}"
        skipped = "" if name in required else f" | {rule}_first_{i + 1}"
        yield f"{rule}_first_{i}: {given}{skipped}"
        yield f'{rule}_after_{i}: ", " {given}{left_out}'
        yield f"{rule}_value_{i}: {_literal(kind, shared)}"
    yield f'{rule}_first_{len(properties)}: ""'
    yield f'{rule}_after_{len(properties)}: ""'


def _literal(schema: object, shared: _Shared) -> str:
    if not isinstance(schema, Mapping):
        schema = {}
    if schema.get("type") == "boolean":
        return '"True" | "False"'
    return f"%json {json.dumps({**schema, **shared.of(schema)})}"


class _Shared:
    """The shared definitions of a schema, and llguidance's options for it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._always = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
        groups = {group: schema.get(group) for group in _SHARED}
        self._known = {
            (group, name): part
            for group, parts in groups.items()
            if isinstance(parts, Mapping)
            for name, part in parts.items()
        }
        self._names = {name: _references(part) for name, part in self._known.items()}

    def of(self, part: object) -> dict[str, Any]:
        """Return the keys to add to a part of the schema so that it can stand alone."""
        found: dict[str, Any] = {}
        seen: set[tuple[str, str]] = set()
        left = _references(part)
        while left:
            group, name = left.pop()
            if (group, name) in self._known and (group, name) not in seen:
                seen.add((group, name))
                found.setdefault(group, {})[name] = self._known[group, name]
                left |= self._names[group, name]
        return {**found, **self._always}


def _references(schema: object) -> set[tuple[str, str]]:
    """Find the group and name of each definition that a schema refers to. Without recursion: a
    client's schema could exhaust the stack."""
    found: set[tuple[str, str]] = set()
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            match = _REFERENCE.match(reference) if isinstance(reference, str) else None
            if match is not None:
                name = unquote(match[2]).replace("~1", "/").replace("~0", "~")
                found.add((match[1], name))
            left += part.values()
        elif isinstance(part, list):
            left += part
    return found
