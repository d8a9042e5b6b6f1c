"""Define the pieces of an answer: text, tool-call deltas, scored tokens and finish reasons.

`Choice` and `Echo` make them; the forms of all APIs write them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.server.tools.delta import Arguments, Began, Content, Delta


@dataclass(frozen=True, slots=True)
class Scored:
    """A token, and how likely it was."""

    token: int
    at: int
    """Characters of the choice's text that were said before it."""
    logprob: float | None
    """None: not known, as of the first token of a prompt."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens there, likeliest first."""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What one token, the prompt's echo, or the end of an output adds to a choice."""

    choice: int
    text: str
    """May be empty: of an incomplete character, or held back as the beginning of a stop string."""
    scored: tuple[Scored, ...] = ()
    """Empty where no log-probabilities are asked for."""
    deltas: tuple[Delta, ...] = ()
    """The text and calls of functions in the order of the output; empty where none can be called,
    or where nothing comes."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or token that the client named, if one ended the output."""

    @property
    def calls(self) -> tuple[Began | Arguments, ...]:
        """Calls of functions that begin, or get more arguments."""
        return tuple(d for d in self.deltas if not isinstance(d, Content))

    @property
    def parts(self) -> tuple[Delta, ...]:
        """Text and calls in order, whether or not functions can be called."""
        return self.deltas or ((Content(self.text),) if self.text else ())

    def ended_by(self, end: OutputPiece) -> OutputPiece:
        """Together with the end of the same choice, which follows it."""
        return OutputPiece(
            self.choice,
            self.text + end.text,
            self.scored + end.scored,
            self.deltas + end.deltas,
            end.finish_reason,
            end.stop_reason,
        )
