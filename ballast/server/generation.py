"""All choices of one client's request, from submission to the last token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from ballast.cluster.controller import Outlet
from ballast.core.clock import Clock
from ballast.core.event import Cancelled, Failed, Finished, Output, TokenOut
from ballast.server.choice import Choice, Piece
from ballast.server.faults import Fault
from ballast.server.metrics import Metrics
from ballast.server.responses import Usage
from ballast.server.timing import Timing
from ballast.server.watch import current


class Generation:
    """Reads `outlet`; `choices` by request id. Whoever holds it must `close` it."""

    def __init__(
        self,
        model: str,
        outlet: Outlet,
        choices: Mapping[str, Choice],
        arrived: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.model = model
        self._outlet = outlet
        self._choices = choices
        self._clock = clock
        self._metrics = metrics
        self._timings = {i: Timing(arrived) for i in choices}
        note = current()
        if note is not None:
            note.answer = self

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, until every choice has ended. Raises Fault if one fails."""
        while any(c.finish_reason is None for c in self._choices.values()):
            outputs = await self._outlet.take()
            now = self._clock.now()
            pieces = [p for o in outputs if (p := self._piece(o, now)) is not None]
            if pieces:
                yield pieces

    def close(self) -> None:
        """Want no more: requests still open are withdrawn, and their memory is freed."""
        left = self._outlet.open & self._choices.keys()
        self._outlet.close()
        now = self._clock.now()
        for request_id in left:
            if self._choices[request_id].finish_reason is None:
                self._end(request_id, "abort", now)

    @property
    def size(self) -> int:
        """Number of choices."""
        return len(self._choices)

    @property
    def timings(self) -> Sequence[Timing]:
        """By choice."""
        return list(self._timings.values())

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """By choice; None where it has not ended."""
        return [c.finish_reason for c in self._choices.values()]

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        choices = self._choices.values()
        prompts = {c.prompt: c for c in choices}.values()  # each counts once
        return Usage.of(
            sum(c.prompt_tokens for c in prompts),
            sum(c.output_tokens for c in choices),
            sum(c.cached_tokens for c in prompts),
        )

    def _piece(self, output: Output, now: float) -> Piece | None:
        choice = self._choices[output.request_id]
        if choice.finish_reason is not None:
            return None  # past a stop string
        timing = self._timings[output.request_id]
        match output:
            case TokenOut():
                piece = choice.take(output)
                self._metrics.token(self.model, timing, choice.prompt_tokens, now)
                if piece.finish_reason is not None:
                    self._outlet.withdraw(output.request_id)
            case Finished():
                piece = choice.end(output)
            case Failed():
                self._metrics.failed(self.model, output.code)
                raise Fault.of_failed(output)
            case Cancelled():
                raise Fault(500, "the request was cancelled", "cancelled")
        if piece.finish_reason is not None:
            self._end(output.request_id, piece.finish_reason, now)
        return piece

    def _end(self, request_id: str, reason: str, now: float) -> None:
        choice, timing = self._choices[request_id], self._timings[request_id]
        tokens = (choice.prompt_tokens, choice.output_tokens)
        self._metrics.finished(self.model, timing, *tokens, reason, now)
