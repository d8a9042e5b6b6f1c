"""Define the pieces of an answer: text, reasoning, calls of tools, scored tokens, finish reasons.

`Choice` and `Echo` make them; the forms of all APIs write them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.server.tools.delta import Arguments, Began, Content, Delta, Thought


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability."""

    token: int
    at: int
    """Offset of the token's text in the choice's text, in characters."""
    logprob: float | None
    """Log-probability; None where there is none, as for the first token of a prompt."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this position with their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """The part of a choice that one token, the prompt's echo, or the end of the output adds."""

    choice: int
    text: str
    """Text; empty for an incomplete character, or while it is held back as a possible stop
    string."""
    scored: tuple[ScoredToken, ...] = ()
    """Scored tokens; empty where no log-probabilities are requested."""
    deltas: tuple[Delta, ...] = ()
    """Text, reasoning and tool calls in the order of the output; empty where there is text
    alone."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or token that the client named, if one ended the output."""

    @property
    def calls(self) -> tuple[Began | Arguments, ...]:
        """Tool-call deltas: calls that begin, or that get more arguments."""
        return tuple(d for d in self.deltas if isinstance(d, Began | Arguments))

    @property
    def thought(self) -> str:
        """Reasoning."""
        return "".join(d.text for d in self.deltas if isinstance(d, Thought))

    @property
    def parts(self) -> tuple[Delta, ...]:
        """Text, reasoning and tool calls in order, whether or not there is more than text."""
        return self.deltas or ((Content(self.text),) if self.text else ())

    def ended_by(self, end: OutputPiece) -> OutputPiece:
        """Merge with the next piece, which ends the same choice."""
        return OutputPiece(
            self.choice,
            self.text + end.text,
            self.scored + end.scored,
            self.deltas + end.deltas,
            end.finish_reason,
            end.stop_reason,
        )
