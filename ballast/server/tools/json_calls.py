"""Parse tool calls written in JSON: objects with name and arguments, or a name, then arguments.

Parsing is lenient: arguments are passed on as written, and are valid JSON if the model wrote valid
JSON. Only keys and names decide whether text is a call, and these must be right.
"""

from __future__ import annotations

import json
import re

from ballast.server.tools.reader import CallReader, NoCall, Reading

_MOST_HEADER = 256
_ARGUMENTS = ("arguments", "parameters")
_KNOWN = ("name", "type", "id", *_ARGUMENTS)


def json_calls(reader: CallReader, header: re.Pattern[str] | None) -> Reading[None]:
    """Read one call, a list of calls, or, if there is a `header` pattern, a header and
    arguments."""
    yield from reader.blank()
    first = yield from reader.peek()
    if first == "[" and header is not None:
        # A name never begins with a bracket.
        header = None
    if header is not None and first != "{":
        yield from _headed(reader, header)
    elif first == "[":
        yield from reader.take()
        while True:
            yield from reader.blank()
            yield from _object(reader)
            yield from reader.blank()
            if (yield from reader.peek()) != ",":
                break
            yield from reader.take()
        yield from reader.expect("]")
    else:
        yield from _object(reader)
    reader.accept()


def _headed(reader: CallReader, header: re.Pattern[str]) -> Reading[None]:
    text = ""
    while (yield from reader.peek()) != "{":
        text += yield from reader.take()
        if len(text) > _MOST_HEADER:
            raise NoCall
    match = header.fullmatch(text)
    if match is None:
        raise NoCall
    reader.begin(match["name"])
    yield from _value(reader, passed_on=True)


def _object(reader: CallReader) -> Reading[None]:
    """Read `{"name": ..., "arguments": ...}`, in any order and with keys that have no effect."""
    yield from reader.expect("{")
    name: str | None = None
    arguments: str | None = None
    begun = False
    while True:
        yield from reader.blank()
        key = yield from _string(reader)
        yield from reader.blank()
        yield from reader.expect(":")
        yield from reader.blank()
        if key not in _KNOWN and not begun:
            raise NoCall
        if key == "name" and name is None:
            name = yield from _string(reader)
            if not reader.callable(name):
                raise NoCall
            if arguments is not None:
                reader.begin(name)
                reader.grow(arguments)
                begun = True
        elif key in _ARGUMENTS and arguments is None:
            if name is not None:
                reader.begin(name)
                begun = True
            if begun and (yield from reader.peek()) == "{":
                arguments = yield from _value(reader, passed_on=True)
            else:
                arguments = _as_object((yield from _value(reader)))
                if begun:
                    reader.grow(arguments)
        else:
            yield from _value(reader)
        yield from reader.blank()
        if (yield from reader.peek()) != ",":
            break
        yield from reader.take()
        if begun:
            reader.accept()
    yield from reader.expect("}")
    if name is None:
        raise NoCall
    if not begun:
        reader.begin(name)
        reader.grow("{}")
    reader.accept()


def _string(reader: CallReader) -> Reading[str]:
    """Read a string's text. Raises NoCall for any other value, or text that is no valid Unicode."""
    if (yield from reader.peek()) != '"':
        raise NoCall
    raw = yield from _value(reader)
    try:
        text = str(json.loads(raw))
        text.encode()
    except ValueError:
        raise NoCall from None
    return text


def _value(reader: CallReader, *, passed_on: bool = False) -> Reading[str]:
    """Read the text of one value without parsing it; with `passed_on`, add it to the current call's
    arguments."""
    text: list[str] = []
    depth = 0
    quoted = escaped = False
    while True:
        character = yield from reader.peek()
        if not quoted and depth == 0 and (character in ",]}" or character.isspace()):
            break  # a number or a word ends where the next thing begins; END is in ",]}" too
        yield from reader.take()
        text.append(character)
        if passed_on:
            reader.grow(character)
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        else:
            continue
        if depth == 0 and not quoted:
            break
    return "".join(text)


def _as_object(text: str) -> str:
    """Convert arguments that are no object to one: models write them as a text, or as null."""
    try:
        value = json.loads(text)
        if value is None:
            return "{}"
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    return text
