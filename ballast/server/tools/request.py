"""Validate a request's fields for tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ballast.core.errors import InvalidRequest
from ballast.server.structured.grammar import prepared

MOST_FUNCTIONS = 128
_UNSAFE = re.compile(r"[^\w.:/-]", re.ASCII)
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")


def runs_elsewhere(tool: object) -> bool:
    """Whether a tool is of a kind that cannot be called here, such as `web_search` or `custom`: a
    request with such tools is answered without them."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind != "function"


def tools_left_out(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the tools that a request is answered without: kind, and name where there is one."""
    return [
        f"tool {tool['type']} {_tool_name(tool)}".rstrip() for tool in tools if runs_elsewhere(tool)
    ]


def _tool_name(tool: Mapping[str, Any]) -> str:
    inner = tool.get(tool["type"])  # as custom tools of chat completions have it
    found = (inner if isinstance(inner, Mapping) else tool).get("name")
    return found if isinstance(found, str) and found != tool["type"] else ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of its arguments, of type object, as `structured.grammar.prepared` returns it."""
    param: str
    """Path of the schema in the request, for errors."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that a request offers, and whether the model must call one."""

    functions: tuple[Function, ...]
    """Functions that may be called; with a named function as `tool_choice`, that one only."""
    forced: bool
    """Whether the answer must be a call."""
    parallel: bool
    """Whether the answer may have several calls."""

    @classmethod
    def of(cls, tools: object, tool_choice: object = None, parallel: object = None) -> Tools | None:
        """Validate the fields `tools`, `tool_choice` and `parallel_tool_calls` of a request.

        None if nothing can be called: without functions (tools of other kinds are left out), or
        with the choice `none`. Raises InvalidRequest. Does not compile the schemas: that is done
        where they are used.
        """
        if parallel is not None and not isinstance(parallel, bool):
            raise InvalidRequest("parallel_tool_calls is true or false", "parallel_tool_calls")
        functions = _functions(tools)
        if tool_choice in (None, "auto"):
            tool_choice = "auto" if functions else "none"
        if tool_choice == "none":
            return None
        if not functions:
            raise InvalidRequest(
                "tool_choice: no function to call; send one in tools, or leave tool_choice out",
                "tool_choice",
            )
        several = parallel is not False
        if isinstance(tool_choice, str):
            if tool_choice not in ("auto", "required"):
                raise InvalidRequest(
                    "tool_choice is none, auto, required, or an object that names a function",
                    "tool_choice",
                )
            return cls(functions, tool_choice == "required", several)
        name = _named(tool_choice)
        chosen = tuple(f for f in functions if f.name == name)
        if not chosen:
            raise InvalidRequest(f"no tool has the name {name!r}", "tool_choice.function.name")
        return cls(chosen, True, False)


def _functions(tools: object) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidRequest("tools is a list", "tools")
    if len(tools) > MOST_FUNCTIONS:
        raise InvalidRequest(f"at most {MOST_FUNCTIONS} tools", "tools")
    functions = tuple(
        _function(tool, f"tools.{i}") for i, tool in enumerate(tools) if not runs_elsewhere(tool)
    )
    if len({f.name for f in functions}) < len(functions):
        raise InvalidRequest("two tools have one name", "tools")
    return functions


def _function(tool: object, where: str) -> Function:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(
            'a tool is an object like {"type": "function", "function": {"name": "..."}}',
            f"{where}.type",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest("a tool has an object `function`", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            "a function's name has 1 to 128 of the characters a-z A-Z 0-9 _ . : / -",
            f"{where}.function.name",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest("a description is a text", f"{where}.function.description")
    schema = function.get("parameters")
    where = f"{where}.function.parameters"
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequest("parameters is a JSON schema of type object", where)
    schema = {"type": "object", **schema}
    return Function(name, prepared(schema, where, lenient=not function.get("strict")), where)


def _named(tool_choice: Any) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if runs_elsewhere(tool_choice):
        kind = _UNSAFE.sub("_", str(tool_choice["type"])[:64])
        raise InvalidRequest(
            f"tool_choice: {kind} cannot be called here, only a function can", "tool_choice.type"
        )
    if not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice names a function, as {"type": "function", "function": {"name": "..."}}',
            "tool_choice.function.name",
        )
    return name


def arguments_of(text: object) -> object:
    """Decode the arguments of an earlier call, which clients send as JSON text.

    Text that is no JSON is returned unchanged: a model wrote it, and may see it again.
    """
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text) if text else {}
    except (ValueError, RecursionError):
        return text
