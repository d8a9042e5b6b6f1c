"""Select how one model writes tool calls, from its chat template or the fleet file's `tool_parser`.

Belongs to the model's `Tokenizer`; gives each request with tools its parser and grammar.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast.core.errors import ConfigError, InvalidRequest
from ballast.server.http.bodies import MOST_WEIGHT, weight
from ballast.server.structured.grammar import checked, of_schema
from ballast.server.tools.enforced import calls_grammar
from ballast.server.tools.parser import ToolParser
from ballast.server.tools.request import Tools, arguments_of
from ballast.server.tools.syntax import SYNTAXES, Syntax, recognised

DESCRIBED = "hermes"
"""The syntax that is described to models whose chat template has none: JSON between tags is what
most models have seen."""
RESULT = "<tool_response>\n{}\n</tool_response>"
"""How a result is written where the chat template has no place for one."""
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """The tool-call syntax of one model, with the markers that its tokenizer has as single
    tokens."""

    name: str
    syntax: Syntax
    marker_tokens: Mapping[str, int]
    """Ids of the markers that are single tokens. The detokenizer must show those, even special
    ones, which it otherwise hides."""
    described: bool = False
    """Whether the system message describes functions and the syntax of calls, because the chat
    template does not, or writes calls in a syntax that is not known here."""

    @classmethod
    def of(
        cls, template: str, parser: str, token_id: Callable[[str], int | None]
    ) -> ToolDialect | None:
        """Select the dialect of a model by its chat template; None without a template.

        `parser` names a dialect, or is `auto`; raises ConfigError for other names. With `auto`, a
        template that knows no tools, or no known syntax, gets DESCRIBED. `token_id` returns the id
        of the single token, special or not, that is spelled so, or None.
        """
        if parser not in ("auto", *SYNTAXES):
            allowed = ", ".join(SYNTAXES)
            raise ConfigError("tool_parser", parser, f"it is auto or one of {allowed}")
        if parser == "auto" and not template:
            return None
        found = recognised(template) if parser == "auto" else parser
        name = found or DESCRIBED
        syntax = SYNTAXES[name]
        ids = {marker: token_id(marker) for marker in syntax.markers}
        marker_tokens = {m: i for m, i in ids.items() if i is not None}
        return cls(name, syntax, marker_tokens, described=found is None)

    def grammar(self, tools: Tools) -> str:
        """Build the grammar of outputs that must be a tool call; empty where the output need not be
        one.

        Raises InvalidRequest. Waits for another process: call it in a thread.
        """
        if not tools.forced:
            return ""
        syntax, functions, parallel = self.syntax, tools.functions, tools.parallel
        # Check it with markers as text: the checking process lacks this model's tokens.
        text = calls_grammar(syntax, functions, parallel, {})
        try:
            checked(text, "tools")
        except InvalidRequest:
            for function in functions:
                of_schema(function.schema, function.param)  # raises for the function at fault
            raise
        return calls_grammar(syntax, functions, parallel, self.marker_tokens)

    def parser(self, tools: Tools) -> ToolParser:
        """Create the parser for one output of a request with `tools`."""
        return ToolParser(self.syntax, frozenset(f.name for f in tools.functions), self._new_id)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Convert messages for the chat template, which gets them beside `tools`.

        Most templates expect the arguments of earlier calls as objects, where clients send texts;
        Mistral's accept only ids of nine letters and digits, where clients may have other servers'.
        """
        turns = [self._turn(message) for message in messages]
        if self.syntax.tools_in_system and tools:
            if not turns or turns[0].get("role") != "system":
                turns.insert(0, {"role": "system", "content": ""})
            turns[0]["tools"] = _as_text([t.get("function", t) for t in tools])
        return turns

    def description(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Describe functions, and how to call them, for the system message; empty unless
        `described`, and without tools. Raises InvalidRequest."""
        if not self.described or not tools:
            return ""
        functions = "\n".join(_as_text(tool.get("function", tool)) for tool in tools)
        example = self.syntax.written([("NAME", '{"ARGUMENT": VALUE}')])
        return (
            f"# Functions\n\nYou can call these functions:\n{functions}\n\n"
            f"To call one, write its name, and arguments that follow its JSON schema, like this:\n"
            f"{example}\n\nFor several calls, repeat that. The results come back between "
            "<tool_response> and </tool_response>. Where no call is needed, answer in plain text."
        )

    def written(self, calls: Sequence[object]) -> str:
        """Write earlier calls as the model is to write them, for templates that leave them out."""
        found = [function for call in calls if (function := _function_of(call)) is not None]
        return self.syntax.written(
            [(str(f.get("name")), _as_arguments(f.get("arguments"))) for f in found]
        )

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not self.syntax.call_id and "tool_call_id" in message:
            message = {**message, "tool_call_id": _nine(message["tool_call_id"])}
        calls = message.get("tool_calls")
        if not calls:
            return {k: v for k, v in message.items() if k != "tool_calls"}
        if isinstance(calls, Sequence) and not self.syntax.call_id:
            calls = [
                {**c, "id": _nine(c["id"])} if isinstance(c, Mapping) and "id" in c else c
                for c in calls
            ]
        if isinstance(calls, Sequence) and not self.syntax.text_arguments:
            calls = [_with_object(call) for call in calls]
        return {**message, "tool_calls": calls}

    def _new_id(self) -> str:
        if self.syntax.call_id:
            return self.syntax.call_id + secrets.token_hex(12)
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest where the arguments of earlier calls have too many values together: they
    are JSON within JSON, whose values the weight of the body does not count. To be called before
    anything reads them."""
    left = MOST_WEIGHT
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = _function_of(call)
            arguments = None if function is None else function.get("arguments")
            if isinstance(arguments, str):
                left -= weight(arguments.encode(errors="replace"), left)
            if left < 0:
                why = "the arguments of earlier calls have too many values"
                raise InvalidRequest(f"messages: {why}", "messages")


def _nine(call_id: object) -> object:
    """Return an id of a call as Mistral's templates accept it: the same for the same id."""
    if not isinstance(call_id, str) or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _as_arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else _as_text(arguments or {})


def _as_text(tools: object) -> str:
    try:
        return json.dumps(tools)
    except RecursionError as error:
        raise InvalidRequest("tools: nested too deeply", "tools") from error


def _with_object(call: object) -> object:
    function = _function_of(call)
    if not isinstance(call, Mapping) or function is None:
        return call
    return {
        **call,
        "function": {**function, "arguments": arguments_of(function.get("arguments"))},
    }


def _function_of(call: object) -> Mapping[str, Any] | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else None
