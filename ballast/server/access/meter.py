"""What one client's request costs, counted on its way: for quotas, `Retry-After` and the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ballast.cluster.output_stream import OutputStream
from ballast.core.clock import Clock
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import KeySettings
from ballast.server.access.queue_pace import QueuePace
from ballast.server.access.quotas import KeyQuotas

_FULL = ("queue_full", "queue_timeout")
"""Codes of `FailedOutput` that say the queue was too long."""


class Meter:
    """An output stream that counts. `submissions` are of one model; choices of one prompt share it.

    `pace` and `waiting` (requests) are those of the queue that the model's requests stand in.
    """

    def __init__(
        self,
        stream: OutputStream,
        submissions: Sequence[Submission],
        key: KeySettings | None,
        quotas: KeyQuotas,
        pace: QueuePace,
        waiting: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._stream = stream
        self._key = key
        self._quotas = quotas
        self._pace = pace
        self._waiting = waiting
        self._clock = clock
        self._model = submissions[0].model
        self._prompt_tokens = prompt_tokens(submissions)
        self._first = {s.id for s in submissions if s.sampling.choice == 0}
        self._output_tokens = self._cached_tokens = 0
        self._first_at: float | None = None
        self._reasons: dict[str, str] = {}

    @property
    def open(self) -> set[str]:
        """Requests that have not ended."""
        return self._stream.open

    async def take(self, patience: float | None = None) -> list[Output]:
        """The outputs there are; waits for one, at most `patience` seconds."""
        outputs = await self._stream.take(patience)
        tokens = 0
        for output in outputs:
            if isinstance(output, TokenOutput):
                tokens += 1
            elif isinstance(output, FinishedOutput):
                self._reasons[output.request_id] = output.reason
                self._cached_tokens += output.cached_tokens * (output.request_id in self._first)
                self._pace.ended()
            elif isinstance(output, FailedOutput):
                self._reasons[output.request_id] = "error"
        if tokens:
            self._output_tokens += tokens
            self._quotas.output(self._key, tokens)
            if self._first_at is None:
                self._first_at = self._clock.now()
        return outputs

    def withdraw(self, request_id: str) -> None:
        """A stop string was found: want no more of one choice."""
        self._reasons.setdefault(request_id, "stop")
        self._pace.ended()
        self._stream.withdraw(request_id)

    def close(self) -> None:
        """Want no more of any."""
        for request_id in self._stream.open:
            self._reasons.setdefault(request_id, "abort")
        self._stream.close()

    def retry_after(self, failed: FailedOutput) -> float:
        """Seconds after which the queue may have room, if that was what it failed for."""
        if failed.code not in _FULL:
            return 1.0
        return self._pace.retry_after(self._waiting())

    def fields(self, arrived: float) -> dict[str, Any]:
        """For the log. `arrived`: of the HTTP request, on the meter's clock."""
        told: dict[str, Any] = {
            "model": self._model,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "cached_tokens": self._cached_tokens,
        }
        if self._first_at is not None:
            told["ttft"] = round(self._first_at - arrived, 4)
        if self._reasons:
            told["finish"] = ",".join(sorted(set(self._reasons.values())))
        return told


def prompt_tokens(submissions: Sequence[Submission]) -> int:
    """Of all prompts; one that has several choices counts once."""
    return sum(len(s.prompt) for s in submissions if s.sampling.choice == 0)
