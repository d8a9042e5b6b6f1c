"""Divide one output into reasoning, content and tool calls."""

from __future__ import annotations

from ballast.server.text.reasoning import ReasoningParser
from ballast.server.tools.delta import Content, Delta
from ballast.server.tools.parser import ToolParser


class OutputParser:
    """Parses one output: reasoning first, then tool calls, which do not occur in reasoning. Call
    `push` with its text and `flush` at its end."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolParser | None) -> None:
        """None: the output has none."""
        self._reasoning = reasoning
        self._calls = calls

    @property
    def reasons(self) -> bool:
        """Whether the text now is reasoning."""
        return self._reasoning is not None and self._reasoning.within

    @property
    def called(self) -> bool:
        """Whether the output has called tools, and did not end within a call."""
        return self._calls is not None and self._calls.calls > 0 and not self._calls.cut

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of more text."""
        return self._with_calls(
            [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        )

    def flush(self) -> list[Delta]:
        """Return the deltas of the text held back, at the end of the output."""
        found = [] if self._reasoning is None else self._with_calls(self._reasoning.flush())
        return found + ([] if self._calls is None else self._calls.flush())

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._calls.push(delta.text) if isinstance(delta, Content) else [delta]
        return found
