"""Derive from a request how its output is constrained (forced tool calls, a grammar, or nothing),
and how it is parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ballast.core.errors import InvalidRequest
from ballast.server.generate.output_parser import OutputParser
from ballast.server.http.fair_turns import FairThread
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import RequestContext
from ballast.server.openai.request import ChatRequest, GenerateRequest
from ballast.server.structured.grammar import of_response_format, of_structured_outputs
from ballast.server.text.reasoning import ReasoningTags
from ballast.server.text.tokenizer import Tokenizer
from ballast.server.tools.dialect import ToolDialect
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
    reasoning: ReasoningTags | None = None
    """Tags of the reasoning that may come before the answer; None: none comes, as where a grammar
    begins with the first token."""

    def shown_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that the parser reads, which otherwise have no text."""
        calls = () if self.tools is None else tokenizer.call_tokens
        return frozenset(calls) | (tokenizer.reasoning_tokens if self.reasoning else frozenset())

    def parser(self, prompt_end: Callable[[], str]) -> OutputParser | None:
        """Create the parser of one output; None where it is text alone. `prompt_end` returns the
        last of the prompt's text."""
        calls = None
        if self.tools is not None and self.dialect is not None:
            calls = self.dialect.parser(self.tools)
        reasoning = None if self.reasoning is None else self.reasoning.parser(prompt_end())
        return None if calls is None and reasoning is None else OutputParser(reasoning, calls)


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
        reasoning = tokenizer.reasoning if isinstance(request, ChatRequest) else None
        return OutputConstraint(tools, dialect, reasoning=reasoning)
    grammar = await checking.run(context.caller.name, compiled)
    return OutputConstraint(tools, dialect, grammar)
