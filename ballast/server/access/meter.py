"""Count the tokens, time to first token and ends of one client's request.

The counts feed the key's quotas, `Retry-After` of a full queue, and the request's log line.
`Service` creates one meter for each request; `generate.answer` feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ballast.core.clock import Clock
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import KeySettings
from ballast.server.access.queue_pace import QueuePace
from ballast.server.access.quotas import KeyQuotas

_QUEUE_CODES = ("queue_full", "queue_timeout")
"""Codes of `FailedOutput` for a queue that was too long."""


class RequestMeter:
    """Counts tokens and ends of the submissions of one client's request, all of one model.

    `pace` and `waiting` (number of requests) belong to the queue in which the model's requests
    wait.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        key: KeySettings | None,
        quotas: KeyQuotas,
        pace: QueuePace,
        waiting: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._key = key
        self._quotas = quotas
        self._pace = pace
        self._waiting = waiting
        self._clock = clock
        self._model = submissions[0].model
        self._prompt_tokens = prompt_tokens(submissions)
        self._first_choices = {s.id for s in submissions if s.sampling.choice == 0}
        self._output_tokens = self._cached_tokens = 0
        self._first_token: float | None = None
        self._finish_reasons: dict[str, str] = {}

    def count(self, outputs: Iterable[Output]) -> None:
        """Count outputs that have arrived together."""
        tokens = 0
        for output in outputs:
            if isinstance(output, TokenOutput):
                tokens += 1
                if output.index == 0 and output.request_id in self._first_choices:
                    self._cached_tokens += output.cached_tokens
            elif isinstance(output, FinishedOutput):
                self._finish_reasons[output.request_id] = output.reason
                self._pace.ended()
            elif isinstance(output, FailedOutput):
                self._finish_reasons[output.request_id] = "error"
        if tokens:
            self._output_tokens += tokens
            self._quotas.output(self._key, tokens)
            if self._first_token is None:
                self._first_token = self._clock.now()

    def stopped(self, request_id: str) -> None:
        """Count one request as ended by a stop string."""
        self._finish_reasons.setdefault(request_id, "stop")
        self._pace.ended()

    def aborted(self, request_ids: Collection[str]) -> None:
        """Count requests as withdrawn by their client."""
        for request_id in request_ids:
            self._finish_reasons.setdefault(request_id, "abort")

    def retry_after(self, failed: FailedOutput) -> float:
        """Estimate the seconds until the queue has room, for a request that failed because it was
        full; 1 for any other failure."""
        if failed.code not in _QUEUE_CODES:
            return 1.0
        return self._pace.retry_after(self._waiting())

    def log_fields(self, arrived: float) -> dict[str, Any]:
        """Return the fields of the log line; `arrived`: when the HTTP request arrived, on the
        meter's clock."""
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "cached_tokens": self._cached_tokens,
        }
        if self._first_token is not None:
            fields["ttft"] = round(self._first_token - arrived, 4)
        if self._finish_reasons:
            fields["finish"] = ",".join(sorted(set(self._finish_reasons.values())))
        return fields


def prompt_tokens(submissions: Sequence[Submission]) -> int:
    """Count the tokens of all prompts; a prompt with several choices counts once."""
    return sum(len(s.prompt) for s in submissions if s.sampling.choice == 0)
