"""Turn the tokens of one choice into text as they arrive, up to its stop string or last token.

A choice is the answer's part for one submission to a worker. `Generation` holds all choices of a
request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ballast.core.event import FinishedOutput, PromptScoresOutput, TokenOutput
from ballast.server.generate.echo import Echo
from ballast.server.generate.output_parser import OutputParser
from ballast.server.text.detokenize import Detokenizer
from ballast.server.text.pieces import OutputPiece, ScoredToken
from ballast.server.text.stop_strings import StopScanner
from ballast.server.tools.delta import Content


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """Conditions that end an output before `max_tokens`."""

    strings: tuple[str, ...] = ()
    """Stop strings, found in the text."""
    tokens: tuple[int, ...] = ()
    """Stop tokens that the client named; they add no text."""
    eos: tuple[int, ...] = ()
    """The model's end-of-sequence tokens; empty if they are ignored."""
    min_tokens: int = 0
    """Number of tokens before which no condition ends the output."""

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that cannot be sampled before the output has `min_tokens`."""
        return tuple(sorted({*self.tokens, *self.eos})) if self.min_tokens else ()


class Choice:
    """Text, token counts and finish reason of one choice. Add nothing once `finish_reason` is
    set."""

    def __init__(
        self,
        index: int,
        prompt: int,
        prompt_tokens: int,
        detokenizer: Detokenizer,
        stops: StopConditions,
        *,
        echo: Echo | None = None,
        silent: bool = False,
        parser: OutputParser | None = None,
    ) -> None:
        """`echo`: begin with the prompt. `silent`: add no other text (`max_tokens` is 0). `parser`:
        finds reasoning and tool calls in the text; None: there can be none."""
        self.index = index
        self.prompt = prompt
        """Index of its prompt among those of the client's request."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        """Output tokens, up to and including the one that completed a stop string."""
        self.reasoning_tokens = 0
        """Output tokens from the end of the tag that opens reasoning to that of the one that closes
        it."""
        self.cached_tokens = 0
        self.fetched: tuple[tuple[str, int], ...] = ()
        """Of the cached tokens, those whose KV came from tiers below the device, by tier."""
        self.finish_reason: str | None = None
        self.echo = echo
        self._silent = silent
        self._parser = parser
        self._detokenizer = detokenizer
        self._stops = stops
        self._ends = frozenset((*stops.tokens, *stops.eos))
        self._scanner = StopScanner(stops.strings)
        self._said = 0
        """Characters of text that were passed on."""
        self._last: int | None = None

    def add_prompt(self, output: PromptScoresOutput) -> OutputPiece | None:
        """Add scores of the prompt, and return that part of its echo; None where none is wanted."""
        if self.echo is None:
            return None
        piece = self.echo.add(output)
        self._said += len(piece.text)
        return piece

    def opening(self) -> OutputPiece | None:
        """Return what is left of the echoed prompt before the first token; None if nothing is."""
        if self.echo is None:
            return None
        piece, self.echo = self.echo.rest(), None
        self._said += 0 if piece is None else len(piece.text)
        return piece

    def add_token(self, output: TokenOutput) -> OutputPiece:
        """Add one token, and return its text. It ends the choice if it completes a stop string."""
        if output.index == 0:
            self.cached_tokens, self.fetched = output.cached_tokens, output.fetched
        if self._silent:
            return OutputPiece(self.index, "")
        self.output_tokens += 1
        self._last = output.token
        offset = self._said + self._scanner.held
        text = ""
        if output.token not in self._ends or self.output_tokens <= self._stops.min_tokens:
            text = self._detokenizer.push(output.token)
        if self.output_tokens > self._stops.min_tokens:
            text = self._scanner.push(text)
        scored: tuple[ScoredToken, ...] = ()
        if output.logprob is not None:
            scored = (ScoredToken(output.token, offset, output.logprob, output.top),)
        self._said += len(text)
        piece, reasoned = OutputPiece(self.index, text, scored), self._reasons
        stopped = self._scanner.matched is not None
        piece = self._stopped(piece) if stopped else self._parted(piece)
        self.reasoning_tokens += reasoned or self._reasons
        return piece

    def end(self, output: FinishedOutput) -> OutputPiece:
        """End the choice after the worker's last token, and return the text that was held back."""
        if self._silent:
            self.finish_reason = "length"
            return OutputPiece(self.index, "", finish_reason="length")
        text = self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()
        piece = OutputPiece(self.index, text)
        if self._scanner.matched is not None:
            return self._stopped(piece)
        named = output.reason == "stop" and self._last in self._stops.tokens
        return self._last_of(piece, output.reason, self._last if named else None)

    @property
    def _reasons(self) -> bool:
        return self._parser is not None and self._parser.reasons

    def _stopped(self, piece: OutputPiece) -> OutputPiece:
        """End the choice by a stop string."""
        return self._last_of(piece, "stop", self._scanner.matched)

    def _last_of(self, piece: OutputPiece, reason: str, by: int | str | None) -> OutputPiece:
        piece = self._parted(piece, last=True)
        if reason == "stop" and self._parser is not None and self._parser.called:
            reason = "tool_calls"  # a stop string may end the output within a call
        self.finish_reason = reason
        return replace(piece, finish_reason=reason, stop_reason=by)

    def _parted(self, piece: OutputPiece, *, last: bool = False) -> OutputPiece:
        """Divide a piece into reasoning, content and tool calls, where there can be any."""
        if self._parser is None:
            return piece
        deltas = self._parser.push(piece.text)
        if last:
            deltas += self._parser.flush()
        content = "".join(d.text for d in deltas if isinstance(d, Content))
        return replace(piece, text=content, deltas=tuple(deltas))
