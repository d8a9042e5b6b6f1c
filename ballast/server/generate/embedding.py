"""The embeddings of one client's request."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Sequence

from ballast.core.clock import Clock
from ballast.core.event import CancelledOutput, EmbeddingOutput, FailedOutput, FinishedOutput
from ballast.core.request import Submission
from ballast.server.access.meter import Meter
from ballast.server.http import request_context
from ballast.server.http.faults import Fault
from ballast.server.observe.latency import Timing
from ballast.server.observe.metrics import Metrics
from ballast.server.openai.records import EmbeddingItem, EmbeddingList, EmbeddingUsage, Usage


class Embedding:
    """Reads `stream`. Whoever holds it must `close` it."""

    def __init__(
        self,
        model: str,
        stream: Meter,
        submissions: Sequence[Submission],
        arrived: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.model = model
        self._stream = stream
        self._submissions = submissions
        self._timings = {s.id: Timing(arrived) for s in submissions}
        self._reasons: dict[str, str] = {}
        self._clock = clock
        self._metrics = metrics
        request_context.current().answer = self

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return Usage.of(sum(len(s.prompt) for s in self._submissions), 0, 0)

    @property
    def timings(self) -> Sequence[Timing]:
        """By text."""
        return list(self._timings.values())

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """By text; None where it has not ended."""
        return [self._reasons.get(s.id) for s in self._submissions]

    async def whole(self, encoding: str, name: str) -> EmbeddingList:
        """The answer, of the model under this name; `encoding` is `float` or `base64`. Raises
        Fault."""
        values: dict[str, bytes] = {}
        while len(self._reasons) < len(self._submissions):
            for output in await self._stream.take():
                if isinstance(output, EmbeddingOutput):
                    values[output.request_id] = output.values
                elif isinstance(output, FailedOutput):
                    self._metrics.failed(self.model, output.code)
                    raise Fault.of_failed(output, self._stream.retry_after(output))
                elif isinstance(output, CancelledOutput):
                    raise Fault(500, "the request was cancelled", "cancelled")
                elif isinstance(output, FinishedOutput):
                    self._end(output)
        count = self.usage.prompt_tokens
        return EmbeddingList(
            data=[
                EmbeddingItem(index=i, embedding=_told(values[s.id], encoding))
                for i, s in enumerate(self._submissions)
            ],
            model=name,
            usage=EmbeddingUsage(prompt_tokens=count, total_tokens=count),
        )

    def _end(self, output: FinishedOutput) -> None:
        self._reasons[output.request_id] = output.reason
        timing = self._timings[output.request_id]
        count, now = output.prompt_tokens, self._clock.now()
        self._metrics.finished(self.model, timing, count, 0, output.reason, now)

    def close(self) -> None:
        """Want no more."""
        self._stream.close()


def _told(values: bytes, encoding: str) -> list[float] | str:
    """float32, little endian, as numbers or as they are."""
    if encoding == "base64":
        return base64.b64encode(values).decode()
    numbers = array.array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
