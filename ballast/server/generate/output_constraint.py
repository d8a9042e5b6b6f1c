"""Derive from a request how its output is constrained: forced tool calls, a grammar, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.errors import InvalidRequest
from ballast.server.http.fair_turns import FairThread
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import RequestContext
from ballast.server.openai.request import ChatRequest, GenerateRequest
from ballast.server.structured.grammar import of_response_format, of_structured_outputs
from ballast.server.text.tokenizer import Tokenizer
from ballast.server.tools.dialect import ToolDialect
from ballast.server.tools.parser import ToolParser
from ballast.server.tools.request import Tools

MOST_CHECKS_EACH, MOST_CHECKS = 64, 512
"""Most grammars that wait to be checked, of one API key and in all; a check takes at most about
`grammar_check.CPU_SECONDS`."""


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """Constraint of one request's output: tools that it may call, and a grammar that it must
    follow."""

    tools: Tools | None = None
    """Tools that can be called; None: none."""
    dialect: ToolDialect | None = None
    grammar: str = ""

    def parser(self) -> ToolParser | None:
        """Create the tool-call parser of one output; None where no tool can be called."""
        if self.tools is None or self.dialect is None:
            return None
        return self.dialect.parser(self.tools)


def checks() -> FairThread:
    """Create the thread on which grammars are checked: a separate one, so that checks delay no
    other work."""
    return FairThread("grammars to be checked", MOST_CHECKS_EACH, MOST_CHECKS)


async def constraint_of(
    request: GenerateRequest, tokenizer: Tokenizer, checking: FairThread, context: RequestContext
) -> OutputConstraint:
    """Derive a request's constraint; its grammar is checked on the thread `checking`.

    Raises InvalidRequest, and Fault where too many grammars wait to be checked.
    """
    tools = None
    if isinstance(request, ChatRequest):
        asked = (request.tools, request.tool_choice, request.parallel_tool_calls)
        tools = await off_loop(context.large_body, lambda: Tools.of(*asked))
    dialect = tokenizer.dialect
    if tools is not None and dialect is None:
        raise InvalidRequest(
            "tools: this model has no chat template, which conversations need; use /v1/completions",
            "tools",
        )
    if request.response_format is not None and request.structured_outputs is not None:
        raise InvalidRequest("structured_outputs: there is a response_format", "structured_outputs")

    def compiled() -> str:
        if tools is not None and tools.forced and dialect is not None:
            return dialect.grammar(tools)
        if request.structured_outputs is not None:
            return of_structured_outputs(request.structured_outputs)
        return of_response_format(request.response_format)

    free = request.response_format is None and request.structured_outputs is None
    if free and (tools is None or not tools.forced):
        return OutputConstraint(tools, dialect)
    grammar = await checking.run(context.caller.name, compiled)
    return OutputConstraint(tools, dialect, grammar)
