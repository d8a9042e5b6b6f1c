"""One choice of an answer: tokens of one request in the worker, turned into text as they come."""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.event import Finished, TokenOut
from ballast.server.detokenize import Detokenizer
from ballast.server.stopstrings import StopScanner


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token, or the end of an output, adds to a choice."""

    choice: int
    text: str
    """May be empty: of an incomplete character, or held back as the beginning of a stop string."""
    token: int | None
    """None: the end of the output, which adds no token."""
    logprob: float | None = None
    finish_reason: str | None = None


class Choice:
    """Text, counts and end of one choice. Nothing is taken in once `finish_reason` is set."""

    def __init__(
        self,
        index: int,
        prompt: int,
        prompt_tokens: int,
        detokenizer: Detokenizer,
        scanner: StopScanner,
    ) -> None:
        self.index = index
        self.prompt = prompt
        """Number of its prompt among those of the client's request."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        """Up to and including the token that completed a stop string."""
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._scanner = scanner

    def take(self, output: TokenOut) -> Piece:
        """One more token. It ends the choice if it completes a stop string."""
        self.output_tokens += 1
        text = self._scanner.push(self._detokenizer.push(output.token))
        if self._scanner.matched is not None:
            self.finish_reason = "stop"
        return Piece(self.index, text, output.token, output.logprob, self.finish_reason)

    def end(self, output: Finished) -> Piece:
        """The worker's last word."""
        self.cached_tokens = output.cached_tokens
        self.finish_reason = output.reason
        text = self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()
        if self._scanner.matched is not None:
            self.finish_reason = "stop"
        return Piece(self.index, text, None, None, self.finish_reason)
