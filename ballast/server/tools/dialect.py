"""Select how one model writes tool calls, from its chat template or the fleet file's `tool_parser`.

Belongs to the model's `Tokenizer`; gives each request with tools its parser and grammar.
"""

from __future__ import annotations

import json
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


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """The tool-call syntax of one model, with the markers that its tokenizer has as single
    tokens."""

    name: str
    syntax: Syntax
    marker_tokens: Mapping[str, int]
    """Ids of the markers that are single tokens. The detokenizer must show those, even special
    ones, which it otherwise hides."""

    @classmethod
    def of(
        cls, template: str, parser: str, token_id: Callable[[str], int | None]
    ) -> ToolDialect | None:
        """Select the dialect of a model by its chat template; None if the template does not support
        tools.

        `parser` names a dialect, or is `auto`; raises ConfigError for other names. `token_id`
        returns the id of the single token, special or not, that is spelled so, or None.
        """
        if parser not in ("auto", *SYNTAXES):
            allowed = ", ".join(SYNTAXES)
            raise ConfigError("tool_parser", parser, f"it is auto or one of {allowed}")
        name = recognised(template) if parser == "auto" else parser
        if name is None:
            return None
        syntax = SYNTAXES[name]
        ids = {marker: token_id(marker) for marker in syntax.markers}
        return cls(name, syntax, {m: i for m, i in ids.items() if i is not None})

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

        Most templates expect the arguments of earlier calls as objects, where clients send texts.
        Raises InvalidRequest where the arguments have too many values.
        """
        _check_arguments(messages)
        turns = [self._turn(message) for message in messages]
        if self.syntax.tools_in_system and tools:
            if not turns or turns[0].get("role") != "system":
                turns.insert(0, {"role": "system", "content": ""})
            turns[0]["tools"] = _as_text([t.get("function", t) for t in tools])
        return turns

    def _turn(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return {k: v for k, v in message.items() if k != "tool_calls"}
        if not isinstance(calls, Sequence) or self.syntax.text_arguments:
            return dict(message)
        return {**message, "tool_calls": [_with_object(call) for call in calls]}

    def _new_id(self) -> str:
        if self.syntax.call_id:
            return self.syntax.call_id + secrets.token_hex(12)
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _as_text(tools: list[Any]) -> str:
    try:
        return json.dumps(tools)
    except RecursionError as error:
        raise InvalidRequest("tools: nested too deeply", "tools") from error


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Bound the number of values in the arguments of earlier calls: they are JSON within JSON,
    whose values the weight of the body does not count."""
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
