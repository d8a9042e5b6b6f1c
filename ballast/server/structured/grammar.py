"""Convert JSON schemas, regular expressions, choices and Lark grammars to grammars of llguidance.

Each grammar is tried out in another process (`grammar_check`), which the caller waits for: call
these functions in a thread, never on an event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from ballast.core.errors import InvalidRequest
from ballast.server.structured.grammar_check import CHECK

MOST_TEXT = 256 * 1024
"""Most characters of a schema or a grammar."""
MOST_DEPTH = 100
"""Most levels of nesting in a schema; llguidance reads at most 128."""
MOST_CHOICES = 10_000
WHITESPACE = r"[ \n\r\t]{1,20}"
"""Pattern of white space between the parts of JSON, where a request allows any. Bounded: small
models would indent for ever."""
_SPACING = ("disable_any_whitespace", "whitespace_pattern")
"""Keys of `structured_outputs` that control white space in JSON."""


def of_response_format(value: object, param: str = "response_format") -> str:
    """Convert OpenAI's `response_format` to a grammar; empty for plain text. Raises
    InvalidRequest."""
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
    """Convert vLLM's `structured_outputs` to a grammar; empty for none. Raises InvalidRequest.

    It has one of `json`, `json_object`, `regex`, `choice` and `grammar` (llguidance's Lark), and
    possibly options for white space in JSON.
    """
    if value is None:
        return ""
    if not isinstance(value, Mapping):
        raise InvalidRequest("an object", param)
    spacing = {k: value[k] for k in _SPACING if value.get(k) is not None}
    given = {k: v for k, v in value.items() if v is not None and v is not False}
    given = {k: v for k, v in given.items() if k not in _SPACING}
    if len(given) != 1:
        raise InvalidRequest("exactly one of json, json_object, regex, choice, grammar", param)
    [(kind, said)] = given.items()
    where = f"{param}.{kind}"
    if spacing and kind not in ("json", "json_object"):
        raise InvalidRequest(
            "only json and json_object have white space", f"{param}.{next(iter(spacing))}"
        )
    whitespace = _whitespace(spacing, param)
    match kind:
        case "json":
            return _of_schema(_parsed(said, where), where, lenient=True, whitespace=whitespace)
        case "json_object":
            return _of_schema({"type": "object"}, where, lenient=False, whitespace=whitespace)
        case "regex":
            return checked(LLMatcher.grammar_from_regex(_text(said, where)), where)
        case "choice":
            return checked(LLMatcher.grammar_from_lark(_any_of(said, where)), where)
        case "grammar":
            return checked(LLMatcher.grammar_from_lark(_text(said, where)), where)
    raise InvalidRequest("one of json, json_object, regex, choice, grammar", where)


def prepared(
    schema: object, param: str, *, lenient: bool, whitespace: str = ""
) -> Mapping[str, Any]:
    """Bound a JSON schema, and add llguidance's options to it. Raises InvalidRequest.

    `lenient`: keywords that llguidance does not know have no effect, instead of being refused.
    `whitespace`: pattern of the white space between the parts of JSON; empty: none is allowed.
    """
    if not isinstance(schema, Mapping):
        raise InvalidRequest("a JSON schema is an object", param)
    _bounded(schema, param)
    spacing = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {**schema, "x-guidance": {"lenient": lenient, **spacing}}


def of_schema(schema: Mapping[str, Any], param: str) -> str:
    """Convert a `prepared` schema to a grammar. Raises InvalidRequest."""
    try:
        grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"not a usable JSON schema: {error}", param) from error
    return checked(grammar, param)


def _of_schema(schema: object, param: str, *, lenient: bool, whitespace: str = "") -> str:
    if schema is True:
        schema = {}
    return of_schema(prepared(schema, param, lenient=lenient, whitespace=whitespace), param)


def _whitespace(spacing: Mapping[str, object], param: str) -> str:
    """Return the requested pattern of white space; empty: JSON is compact. Raises
    InvalidRequest."""
    compact, pattern = (spacing.get(key) for key in _SPACING)
    if compact is not None and not isinstance(compact, bool):
        raise InvalidRequest("true or false", f"{param}.disable_any_whitespace")
    if pattern is None:
        return WHITESPACE if compact is False else ""
    if compact:
        raise InvalidRequest("any white space is disabled", f"{param}.whitespace_pattern")
    return _text(pattern, f"{param}.whitespace_pattern")


def checked(grammar: str, param: str) -> str:
    """Return `grammar` if llguidance can use it. Raises InvalidRequest."""
    try:
        problem = CHECK.problem(grammar)
    except UnicodeEncodeError:
        problem = "it has half a surrogate pair"
    if problem:
        raise InvalidRequest(f"not usable: {problem[:500]}", param)
    return grammar


def _bounded(schema: object, param: str) -> None:
    """Bound the size and depth of a schema. Without recursion: a client's schema could exhaust the
    stack."""
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
    """Parse a schema that was sent as text, which vLLM accepts, too."""
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
    try:
        value.encode()
    except UnicodeEncodeError as error:
        why = f"half a surrogate pair at character {error.start}"
        raise InvalidRequest(why, param) from error
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
    # One terminal: more than 2,000 rules are too many for a row of llguidance's parser.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(v) for v in value)
