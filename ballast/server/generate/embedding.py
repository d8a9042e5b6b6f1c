"""Collect the embeddings of one client's request, one submission for each text."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from ballast.cluster.output_stream import OutputStream
from ballast.core.clock import Clock
from ballast.core.event import CancelledOutput, EmbeddingOutput, FailedOutput, FinishedOutput
from ballast.core.request import Submission
from ballast.server.access.meter import RequestMeter
from ballast.server.generate.answer import RequestAnswer
from ballast.server.http.json_response import encode
from ballast.server.http.off_loop import off_loop
from ballast.server.http.sliced_response import SLICE_BYTES
from ballast.server.observe.metrics import Metrics
from ballast.server.openai.records import EmbeddingItem, EmbeddingList, EmbeddingUsage, Usage

_LONG = 64
"""Pairs whose cosines are computed on another thread if there are more."""
_LEAST_LENGTH = 1e-30


class Embedding(RequestAnswer):
    """The embeddings of all texts, one submission each."""

    def __init__(
        self,
        model: str,
        submissions: Sequence[Submission],
        stream: OutputStream,
        meter: RequestMeter,
        arrived: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        super().__init__(model, (s.id for s in submissions), stream, meter, arrived, clock, metrics)
        self._submissions = submissions
        self.of_pairs = False
        """Whether each submission is a pair of texts that a cross encoder scores."""
        self._finish_reasons: dict[str, str] = {}

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return Usage.of(sum(len(s.prompt) for s in self._submissions), 0, 0)

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """Finish reason of each text; None where it has not ended."""
        return [self._finish_reasons.get(s.id) for s in self._submissions]

    async def whole(self, encoding: str, name: str) -> Iterator[bytes]:
        """Wait for all embeddings; returns the parts of an `EmbeddingList` as JSON, encoded when
        taken. `encoding`: `float` or `base64`; `name`: the model's name as the client wrote
        it. Raises Fault."""
        values = await self.vectors()
        count = self.usage.prompt_tokens
        usage = EmbeddingUsage(prompt_tokens=count, total_tokens=count)
        empty = encode(EmbeddingList(data=[], model=name, usage=usage))
        return _parts(empty, values, encoding)

    async def similarities(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Wait for all embeddings; returns the cosine of each pair of texts, by their places.
        Raises Fault."""
        rows = [np.frombuffer(value, "<f4").astype("f8") for value in await self.vectors()]

        def cosines() -> list[float]:
            lengths = [max(float(np.linalg.norm(row)), _LEAST_LENGTH) for row in rows]
            return [float(rows[a] @ rows[b]) / lengths[a] / lengths[b] for a, b in pairs]

        return await off_loop(len(pairs) > _LONG, cosines)

    async def scores(self) -> list[float]:
        """Wait for a cross encoder's logits; returns the score of each pair, 0 to 1. Raises
        Fault."""
        logits = [float(numbers_of(value)[0]) for value in await self.vectors()]
        return [
            1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in logits
        ]

    async def vectors(self) -> list[bytes]:
        """Wait for all embeddings; returns each as float32 numbers, little endian. Raises Fault."""
        values: dict[str, bytes] = {}
        while len(self._finish_reasons) < len(self._submissions):
            for output in await self._next_outputs():
                if isinstance(output, EmbeddingOutput):
                    values[output.request_id] = output.values
                elif isinstance(output, FailedOutput | CancelledOutput):
                    raise self._fault_of(output)
                elif isinstance(output, FinishedOutput):
                    self._end(output)
        return [values[s.id] for s in self._submissions]

    def _end(self, output: FinishedOutput) -> None:
        self._finish_reasons[output.request_id] = output.reason
        timing = self._timings[output.request_id]
        count, now = output.prompt_tokens, self._clock.now()
        self._metrics.finished(self.model, timing, count, 0, output.reason, now)


def _parts(empty: bytes, values: Sequence[bytes], encoding: str) -> Iterator[bytes]:
    """Yield the JSON of a list of embeddings; `empty`: that of a list without any."""
    before, data, after = empty.partition(b'"data":[')
    part = before + data
    for i, value in enumerate(values):
        item = encode(EmbeddingItem(index=i, embedding=_encoded(value, encoding)))
        part += b"," + item if i else item
        if len(part) >= SLICE_BYTES:
            yield part
            part = b""
    yield part + after


def _encoded(values: bytes, encoding: str) -> list[float] | str:
    """Convert float32 numbers, little endian, to a list or to base64."""
    return base64.b64encode(values).decode() if encoding == "base64" else numbers_of(values)


def numbers_of(values: bytes) -> list[float]:
    """Convert float32 numbers, little endian."""
    numbers = array.array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
