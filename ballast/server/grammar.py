"""What an output must follow: JSON schemas and their like, as grammars of llguidance.

Everything here waits for another process to compile what a client sent (`grammarcheck`): call it
in a thread, and not on an event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from ballast.core.errors import InvalidRequest
from ballast.server.grammarcheck import CHECK

MOST_TEXT = 256 * 1024
"""Characters of a schema or a grammar."""
MOST_DEPTH = 100
"""Nesting of a schema; llguidance reads at most 128."""
MOST_CHOICES = 10_000
WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between the parts of JSON. Bounded: small models indent for ever where they may."""


def of_response_format(value: object, param: str = "response_format") -> str:
    """The grammar of OpenAI's `response_format`; empty for plain text. Raises InvalidRequest."""
    if value is None:
        return ""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return _of_schema({"type": "object"}, param, lenient=False)
    if kind != "json_schema" or not isinstance(value, Mapping):
        raise InvalidRequest("its type is text, json_object or json_schema", f"{param}.type")
    form = value.get("json_schema")
    if not isinstance(form, Mapping):
        raise InvalidRequest("an object with name and schema is missing", f"{param}.json_schema")
    strict = form.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest("true or false", f"{param}.json_schema.strict")
    schema = form.get("schema")
    return _of_schema(
        {} if schema is None else schema, f"{param}.json_schema.schema", lenient=not strict
    )


def of_structured_outputs(value: object, param: str = "structured_outputs") -> str:
    """The grammar of vLLM's `structured_outputs`, one of `json`, `json_object`, `regex`, `choice`
    and `grammar` (Lark as llguidance knows it); empty for none. Raises InvalidRequest."""
    if value is None:
        return ""
    if not isinstance(value, Mapping):
        raise InvalidRequest("an object", param)
    given = {k: v for k, v in value.items() if v is not None and v is not False}
    if len(given) != 1:
        raise InvalidRequest("exactly one of json, json_object, regex, choice, grammar", param)
    [(kind, said)] = given.items()
    where = f"{param}.{kind}"
    match kind:
        case "json":
            return _of_schema(_parsed(said, where), where, lenient=True)
        case "json_object":
            return _of_schema({"type": "object"}, where, lenient=False)
        case "regex":
            return checked(LLMatcher.grammar_from_regex(_text(said, where)), where)
        case "choice":
            return checked(LLMatcher.grammar_from_lark(_any_of(said, where)), where)
        case "grammar":
            return checked(LLMatcher.grammar_from_lark(_text(said, where)), where)
    raise InvalidRequest("one of json, json_object, regex, choice, grammar", where)


def prepared(schema: object, param: str, *, lenient: bool) -> Mapping[str, Any]:
    """A JSON schema, within bounds, with how llguidance is to read it. Raises InvalidRequest.

    `lenient`: keywords that llguidance does not know have no effect, instead of being refused.
    """
    if not isinstance(schema, Mapping):
        raise InvalidRequest("a JSON schema is an object", param)
    _bounded(schema, param)
    return {**schema, "x-guidance": {"lenient": lenient, "whitespace_pattern": WHITESPACE}}


def of_schema(schema: Mapping[str, Any], param: str) -> str:
    """The grammar of a `prepared` schema. Raises InvalidRequest."""
    try:
        grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"not a usable JSON schema: {error}", param) from error
    return checked(grammar, param)


def _of_schema(schema: object, param: str, *, lenient: bool) -> str:
    if schema is True:
        schema = {}
    return of_schema(prepared(schema, param, lenient=lenient), param)


def checked(grammar: str, param: str) -> str:
    """`grammar`, if llguidance can use it. Raises InvalidRequest."""
    try:
        problem = CHECK.problem(grammar)
    except UnicodeEncodeError:
        problem = "it has half a surrogate pair"
    if problem:
        raise InvalidRequest(f"not usable: {problem[:500]}", param)
    return grammar


def _bounded(schema: object, param: str) -> None:
    """Bounds size and depth, without recursion: the schema is not trusted with ours."""
    level, depth, size = [schema], 0, 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise InvalidRequest(f"nested deeper than {MOST_DEPTH}", param)
        below: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
                size += sum(len(key) + 4 for key in value)
            elif isinstance(value, str):
                size += len(value) + 2
            elif isinstance(value, Sequence):
                below += value
            size += 2
        if size > MOST_TEXT:
            raise InvalidRequest(f"longer than {MOST_TEXT} characters", param)
        level = below


def _parsed(value: object, param: str) -> object:
    """vLLM takes schemas as texts, too."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(_text(value, param))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("not JSON", param) from error


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest("a text", param)
    if len(value) > MOST_TEXT:
        raise InvalidRequest(f"longer than {MOST_TEXT} characters", param)
    return value


def _any_of(value: object, param: str) -> str:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not 0 < len(value) <= MOST_CHOICES
        or not all(isinstance(v, str) and v for v in value)
        or sum(map(len, value)) > MOST_TEXT
    ):
        raise InvalidRequest(f"a list of 1 to {MOST_CHOICES} texts", param)
    # One terminal: as rules, more than 2,000 are too many for a parser's row.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(v) for v in value)
