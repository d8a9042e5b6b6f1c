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
    """Reads the outputs of a client's submissions and counts them. Its owner must `close` it."""

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
        """`request_ids`: ids of the submissions; `arrived`: seconds on `clock`."""
        self.model = model
        self._stream = stream
        self._meter = meter
        self._clock = clock
        self._metrics = metrics
        self._timings = {request_id: Timing(arrived) for request_id in request_ids}

    @property
    def timings(self) -> Sequence[Timing]:
        """Token times of each submission."""
        return list(self._timings.values())

    def log_fields(self, arrived: float) -> dict[str, Any]:
        """Return the fields of the log line; `arrived`: when the HTTP request arrived, on the
        server's clock."""
        return self._meter.log_fields(arrived)

    def close(self) -> None:
        """Withdraw the submissions that are still open, which frees their memory."""
        self._meter.aborted(self._stream.open)
        self._stream.close()

    async def _next_outputs(self, patience: float | None = None) -> list[Output]:
        """Wait for the next outputs, at most `patience` seconds, and count them; empty if none
        came."""
        outputs = await self._stream.take(patience)
        self._meter.count(outputs)
        return outputs

    def _withdraw(self, request_id: str) -> None:
        """Withdraw one submission, whose output a stop string has ended."""
        self._meter.stopped(request_id)
        self._stream.withdraw(request_id)

    def _fault_of(self, output: FailedOutput | CancelledOutput) -> Fault:
        """Convert the failure of a submission to the error for the client."""
        if isinstance(output, FailedOutput):
            self._metrics.failed(self.model, output.code)
            return Fault.of_failed(output, self._meter.retry_after(output))
        return Fault(500, "the request was cancelled", "cancelled")
