"""Read the output stream of one client's request, with the times and counts that metrics need.

Base of `Generation` (text) and `Embedding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ballast.cluster.output_stream import OutputStream
from ballast.core.clock import Clock
from ballast.core.event import CancelledOutput, FailedOutput, Output
from ballast.server.access.meter import RequestMeter
from ballast.server.http.faults import Fault
from ballast.server.observe.latency import Timing
from ballast.server.observe.metrics import Metrics


class RequestAnswer:
    """Reads the outputs of a client's submissions and counts them. Its holder must `close` it."""

    def __init__(
        self,
        model: str,
        request_ids: Iterable[str],
        stream: OutputStream,
        meter: RequestMeter,
        arrived: float,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """`request_ids` of the submissions; `arrived`: seconds on `clock`."""
        self.model = model
        self._stream = stream
        self._meter = meter
        self._clock = clock
        self._metrics = metrics
        self._timings = {request_id: Timing(arrived) for request_id in request_ids}

    @property
    def timings(self) -> Sequence[Timing]:
        """Times of tokens, by submission."""
        return list(self._timings.values())

    def log_fields(self, arrived: float) -> dict[str, Any]:
        """Return the fields of the log line; `arrived`: of the HTTP request, on the server's
        clock."""
        return self._meter.log_fields(arrived)

    def close(self) -> None:
        """Withdraw the submissions that are still open; their memory is freed."""
        self._meter.aborted(self._stream.open)
        self._stream.close()

    async def _next_outputs(self, patience: float | None = None) -> list[Output]:
        """Return and count the next outputs; waits for one, at most `patience` seconds."""
        outputs = await self._stream.take(patience)
        self._meter.count(outputs)
        return outputs

    def _withdraw(self, request_id: str) -> None:
        """Withdraw one submission, whose output a stop string has ended."""
        self._meter.stopped(request_id)
        self._stream.withdraw(request_id)

    def _fault_of(self, output: FailedOutput | CancelledOutput) -> Fault:
        """Turn the failure of a submission into the error that the client gets."""
        if isinstance(output, FailedOutput):
            self._metrics.failed(self.model, output.code)
            return Fault.of_failed(output, self._meter.retry_after(output))
        return Fault(500, "the request was cancelled", "cancelled")
