"""Repeat the prompt at the start of a completion (`echo` of the completions API), with the
log-probability of each prompt token where requested."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.event import PromptScoresOutput
from ballast.server.http.off_loop import off_loop
from ballast.server.openai.request import GenerateRequest
from ballast.server.text.detokenize import Detokenizer
from ballast.server.text.pieces import OutputPiece, ScoredToken
from ballast.server.text.tokenizer import LONG_TEXT, Tokenizer


class EchoedPrompt:
    """Text of a prompt, and of each of its tokens. All choices of the prompt share it; making it
    takes a microsecond or more for each token."""

    def __init__(
        self, text: str | None, tokens: Sequence[int], detokenizer: Detokenizer, *, scored: bool
    ) -> None:
        """`text`: the prompt as the client wrote it; None: decode its tokens. `scored`: whether the
        tokens' own texts are needed."""
        self.tokens = tokens
        pieces = []
        if text is None or scored:
            pieces = [detokenizer.push(token) for token in tokens]
            pieces[-1] += detokenizer.flush()
        self.text = "".join(pieces) if text is None else text
        self.lengths = [len(piece) for piece in pieces]
        self.scored = scored


async def echoed_prompts(
    request: GenerateRequest,
    prompts: Sequence[tuple[str | None, list[int]]],
    tokenizer: Tokenizer,
) -> list[EchoedPrompt | None]:
    """Make what the answer repeats of each prompt (its text, if the client wrote one, and tokens):
    None where it repeats nothing."""
    if not request.echoes:
        return [None] * len(prompts)
    scored = request.requested_logprobs is not None

    def make() -> list[EchoedPrompt | None]:
        return [
            EchoedPrompt(text, tokens, tokenizer.detokenizer(), scored=scored)
            for text, tokens in prompts
        ]

    return await off_loop(sum(len(tokens) for _, tokens in prompts) > LONG_TEXT, make)


class Echo:
    """The echoed prompt of one choice, which comes in parts as its scores do."""

    def __init__(self, prompt: EchoedPrompt, choice: int) -> None:
        self._prompt = prompt
        self._choice = choice
        self._next = 0
        """Position of the first token that no piece has."""
        self._at = 0
        """Offset of its text."""

    def add(self, part: PromptScoresOutput) -> OutputPiece:
        """Return the piece of the next positions, whose scores have arrived. The prompt's first
        token has none, and comes with the second."""
        start = self._at
        scored = [] if self._next else [self._score(None, ())]
        top = part.top or ((),) * len(part.logprobs)
        scored += [self._score(*of) for of in zip(part.logprobs, top, strict=True)]
        return OutputPiece(self._choice, self._prompt.text[start : self._at], tuple(scored))

    def rest(self) -> OutputPiece | None:
        """Return the piece of what no score was awaited for; None if there is nothing left."""
        text = self._prompt.text[self._at :]
        scored: tuple[ScoredToken, ...] = ()
        if self._prompt.scored and not self._next:
            scored = (self._score(None, ()),)
        return OutputPiece(self._choice, text, scored) if text or scored else None

    def _score(self, logprob: float | None, top: tuple[tuple[int, float], ...]) -> ScoredToken:
        position, at = self._next, self._at
        self._next += 1
        self._at = min(at + self._prompt.lengths[position], len(self._prompt.text))
        return ScoredToken(self._prompt.tokens[position], at, logprob, top)
