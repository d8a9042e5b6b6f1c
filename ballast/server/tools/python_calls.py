"""Parse tool calls written in Python: `[search(query="x", limit=3), now()]`."""

from __future__ import annotations

import ast
import json

from ballast.server.tools.reader import CallReader, NoCall, Reading

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_MOST_NAME = 128


def python_calls(reader: CallReader) -> Reading[None]:
    """Read a list of calls. Each argument is passed on as JSON when it is complete."""
    yield from reader.blank()
    yield from reader.expect("[")
    while True:
        yield from reader.blank()
        name = yield from _word(reader, "(")
        yield from reader.expect("(")
        if not reader.callable(name):
            raise NoCall
        yield from _arguments(reader, name)
        yield from reader.blank()
        if (yield from reader.peek()) != ",":
            break
        yield from reader.take()
    yield from reader.expect("]")
    reader.accept()


def _arguments(reader: CallReader, name: str) -> Reading[None]:
    """Read the keyword arguments between the parentheses; positional ones are not supported."""
    begun = False
    yield from reader.blank()
    while (yield from reader.peek()) != ")":
        key = (yield from _word(reader, "=")).strip()
        if not key.isidentifier():
            raise NoCall
        yield from reader.expect("=")
        if not begun:
            reader.begin(name)
        before = ", " if begun else "{"
        begun = True
        value = yield from _expression(reader)
        reader.grow(f"{before}{json.dumps(key)}: {_as_json(value.strip())}")
        if (yield from reader.peek()) == ",":
            yield from reader.take()
            reader.accept()
        yield from reader.blank()
    yield from reader.expect(")")
    if not begun:
        reader.begin(name)
        reader.grow("{")
    reader.grow("}")


def _word(reader: CallReader, end: str) -> Reading[str]:
    text = ""
    while (yield from reader.peek()) != end:
        text += yield from reader.take()
        if len(text) > _MOST_NAME or text[-1] in "\"'()[]{},":
            raise NoCall
    return text


def _expression(reader: CallReader) -> Reading[str]:
    """Read text up to the comma or parenthesis that ends an argument."""
    text: list[str] = []
    closing: list[str] = []
    quote = ""
    escaped = False
    while True:
        character = yield from reader.peek()
        if not quote and not closing and character in (",", ")"):
            return "".join(text)
        yield from reader.take()
        text.append(character)
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in ("'", '"'):
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()


def _as_json(text: str) -> str:
    """Convert a literal of Python or of JSON to JSON; any other text becomes a JSON string."""
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    try:
        return json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text)
