"""Collect all choices of one client's request, from submission to the last token.

`Service.generate` returns a `Generation`; `routes.generate` reads its pieces and must close it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from ballast.cluster.output_stream import OutputStream
from ballast.core.clock import Clock
from ballast.core.event import (
    CancelledOutput,
    FailedOutput,
    FinishedOutput,
    Output,
    PromptScoresOutput,
    TokenOutput,
)
from ballast.server.access.meter import RequestMeter
from ballast.server.generate.answer import RequestAnswer
from ballast.server.generate.choice import Choice
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import RequestTexts
from ballast.server.observe.metrics import Metrics
from ballast.server.openai.records import Usage
from ballast.server.text.pieces import OutputPiece


class Generation(RequestAnswer):
    """Generated text of all choices; `choices` are keyed by submission id."""

    def __init__(
        self,
        model: str,
        choices: Mapping[str, Choice],
        stream: OutputStream,
        meter: RequestMeter,
        arrived: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        super().__init__(model, choices, stream, meter, arrived, clock, metrics)
        self._choices = choices
        self.texts: RequestTexts | None = None
        """Gets the output, where the operator has it kept."""

    async def batches(self, patience: float | None = None) -> AsyncIterator[list[OutputPiece]]:
        """Yield pieces as they arrive, until every choice has ended, and an empty list after each
        `patience` seconds without any. Raises Fault if a choice fails, after yielding the pieces
        before it."""
        while any(c.finish_reason is None for c in self._choices.values()):
            outputs = await self._next_outputs(patience)
            pieces: list[OutputPiece] = []
            fault = self._add_outputs(outputs, pieces)
            if pieces or not outputs:
                yield pieces
            if fault is not None:
                raise fault

    def close(self) -> None:
        """Withdraw the submissions that are still open, which frees their memory."""
        left = self._stream.open & self._choices.keys()
        super().close()
        now = self._clock.now()
        for request_id in left:
            if self._choices[request_id].finish_reason is None:
                self._count(request_id, "abort", now)

    @property
    def size(self) -> int:
        """Number of choices."""
        return len(self._choices)

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """Finish reason of each choice; None where it has not ended."""
        return [c.finish_reason for c in self._choices.values()]

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        choices = list(self._choices.values())
        # Each prompt counts once, by its first choice: the others find what that one has cached.
        prompts = {c.prompt: c for c in reversed(choices)}.values()
        fetched = Counter[str]()
        for c in prompts:
            fetched.update(dict(c.fetched))
        return Usage.of(
            sum(c.prompt_tokens for c in prompts),
            sum(c.output_tokens for c in choices),
            sum(c.cached_tokens for c in prompts),
            sum(c.reasoning_tokens for c in choices),
            fetched,
        )

    def _add_outputs(self, outputs: Iterable[Output], pieces: list[OutputPiece]) -> Fault | None:
        """Append the pieces of outputs that arrived together; the end of a choice is merged with
        its last token. Returns the fault of the first failed choice, if any."""
        now = self._clock.now()
        last: dict[int, int] = {}
        """Index in `pieces` of each choice's last token."""
        for output in outputs:
            choice = self._choices[output.request_id]
            if choice.finish_reason is not None:
                continue  # past a stop string
            if isinstance(output, FailedOutput | CancelledOutput):
                return self._fault_of(output)
            if isinstance(output, TokenOutput | FinishedOutput) and (opening := choice.opening()):
                pieces.append(opening)
            if isinstance(output, TokenOutput):
                last[choice.index] = len(pieces)
                pieces.append(self._token(output, choice, now))
            elif isinstance(output, FinishedOutput):
                end = choice.end(output)
                at = last.get(choice.index)
                if at is None:
                    pieces.append(end)
                else:
                    pieces[at] = pieces[at].ended_by(end)
            elif isinstance(output, PromptScoresOutput) and (part := choice.add_prompt(output)):
                pieces.append(part)
            self._count_end(output.request_id, choice, now)
        return None

    def _token(self, output: TokenOutput, choice: Choice, now: float) -> OutputPiece:
        piece = choice.add_token(output)
        timing = self._timings[output.request_id]
        if output.queued is not None:
            timing.activating = output.activating
        self._metrics.token(self.model, timing, choice.prompt_tokens, now, output.queued)
        if self.texts is not None:
            self.texts.add(piece.thought + piece.text)
        if piece.finish_reason is not None:
            self._withdraw(output.request_id)
        return piece

    def _count_end(self, request_id: str, choice: Choice, now: float) -> None:
        if choice.finish_reason is not None:
            self._count(request_id, choice.finish_reason, now)

    def _count(self, request_id: str, reason: str, now: float) -> None:
        choice, timing = self._choices[request_id], self._timings[request_id]
        tokens = (choice.prompt_tokens, choice.output_tokens)
        self._metrics.finished(self.model, timing, *tokens, reason, now, choice.cached_tokens)
