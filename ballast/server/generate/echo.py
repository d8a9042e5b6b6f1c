"""Repeat the prompt at the start of a completion (`echo` of the completions API), with the
log-probability of each prompt token where requested."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.event import PromptScoresOutput
from ballast.server.text.detokenize import Detokenizer
from ballast.server.text.pieces import OutputPiece, Scored


class Echo:
    """The echoed prompt of one choice. `text`: the prompt as the client wrote it; None: decode its
    tokens."""

    def __init__(
        self, text: str | None, tokens: Sequence[int], detokenizer: Detokenizer, *, scored: bool
    ) -> None:
        self._tokens = tokens
        self._detokenizer = detokenizer
        self._text = text
        self._scored = scored
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []

    def add(self, part: PromptScoresOutput) -> None:
        """Add the scores of the next positions."""
        self._logprobs += part.logprobs
        self._top += part.top or ((),) * len(part.logprobs)

    def piece(self, choice: int) -> OutputPiece:
        """Return the prompt as a piece, once all its scores have arrived. Its first token has
        none."""
        pieces = [self._detokenizer.push(token) for token in self._tokens]
        pieces[-1] += self._detokenizer.flush()
        text = "".join(pieces) if self._text is None else self._text
        if not self._scored:
            return OutputPiece(choice, text)
        scored, at = [], 0
        for i, (token, own) in enumerate(zip(self._tokens, pieces, strict=True)):
            logprob = self._logprobs[i - 1] if i else None
            scored.append(Scored(token, at, logprob, self._top[i - 1] if i else ()))
            at = min(at + len(own), len(text))
        return OutputPiece(choice, text, tuple(scored))
