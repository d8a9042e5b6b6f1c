"""Record sending, tokens and end of each request of a run, live or in virtual time.

`RequestRecorder` is fed by benchmark targets and simulations; `bench.report` summarises its
`RequestRecord`s. Also makes submissions and prompts from workload requests.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.workload.prompts import prompt_for
from ballast.workload.workload import WorkloadRequest, repeated_tokens

Prompts = Callable[[WorkloadRequest], tuple[int, ...]]
"""Makes the token ids of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. All times in seconds from the start of the workload."""

    id: int
    """Id of the `WorkloadRequest`."""
    model: str
    at: float
    """When the workload wanted it sent; all latencies count from here."""
    sent: float
    """When it was sent: later than `at` only by the sender's own lateness."""
    first_token: float | None
    end: float | None
    """When it was answered, or had failed; None if neither had happened at the end of the run."""
    prompt_tokens: int
    output_tokens: int
    """Received; for a failed request those before the failure."""
    token_times: Sequence[float] = ()
    """Arrival of each token; over HTTP, of each chunk, which may hold several. A recorder gives an
    array of machine numbers: 8 bytes a token."""
    cached_tokens: int = 0
    repeated_tokens: int = 0
    """Tokens at its prompt's beginning that an earlier request, for the same model, has as well."""
    preemptions: int = 0
    error: str | None = None
    """Why there is no complete answer; None: answered."""

    @property
    def answered(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float | None:
        """Time to first token; None if none came."""
        return None if self.first_token is None else self.first_token - self.at

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if self.first_token is None or not self.token_times or self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.first_token) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """From `at` to the last token of a complete answer; None for a failed request."""
        return None if self.end is None or self.error is not None else self.end - self.at


def submission_for(
    request: WorkloadRequest, prompt: tuple[int, ...], context: int | None = None
) -> Submission:
    """A greedy submission that generates exactly the workload's number of tokens. `context`: it
    bounds them by the rest of a context of so many, as where a client gives no bound, and who runs
    it has to end it; None: by their number."""
    return Submission(
        id=f"w{request.id}",
        model=request.model,
        prompt=prompt,
        max_tokens=request.output_tokens if context is None else context - len(prompt),
        open_ended=context is not None,
        arrival=request.at,
        ignore_eos=True,
    )


def vocabularies_of(specs: Iterable[ModelSpec]) -> dict[str, int]:
    """Sizes of vocabularies, by the names of models and of their adapters."""
    return {served.name: served.vocab for spec in specs for served in spec.served}


def prompts_of(vocab: Mapping[str, int], seed: int = 0, lowest: int = 0) -> Prompts:
    """Prompts with token ids in [lowest, vocab of the request's model)."""
    return lambda request: prompt_for(request, vocab[request.model], seed, lowest)


@dataclass(slots=True)
class _Entry:
    request: WorkloadRequest
    sent: float
    token_times: array[float] = field(default_factory=lambda: array("d"))
    end: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    error: str | None = None


class RequestRecorder:
    """Records of one run, by submission id. Safe from any thread.

    `origin` is the clock's time at the start of the workload. `record` has the signature of the
    simulator's output callback.
    """

    def __init__(self, origin: float = 0.0) -> None:
        self.origin = origin
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def sent(self, request: WorkloadRequest, submission_id: str, now: float) -> None:
        """Record that `request` is sent now, under this id."""
        with self._lock:
            self._entries[submission_id] = _Entry(request, now - self.origin)

    def record(self, now: float, output: Output) -> None:
        """Enter an output of the engine, which came at `now`."""
        if isinstance(output, TokenOutput):
            self.token(output.request_id, now)
        elif isinstance(output, FinishedOutput):
            self.finished(
                output.request_id,
                now,
                output.prompt_tokens,
                output.output_tokens,
                output.cached_tokens,
                output.preemptions,
            )
        elif isinstance(output, FailedOutput):
            self.failed(output.request_id, now, f"{output.code}: {output.reason}")
        else:
            self.failed(output.request_id, now, "cancelled")

    def token(self, submission_id: str, now: float) -> None:
        """Record the arrival of a token, or of a chunk of them."""
        with self._lock:
            entry = self._entries[submission_id]
            if entry.end is None:
                entry.token_times.append(now - self.origin)

    def tokens(self, submission_ids: Iterable[str], times: Iterable[float]) -> None:
        """Record that each of these requests got a token at each of these times, in order."""
        arrived = array("d", (now - self.origin for now in times))
        with self._lock:
            for submission_id in submission_ids:
                entry = self._entries[submission_id]
                if entry.end is None:
                    entry.token_times.extend(arrived)

    def finished(
        self,
        submission_id: str,
        now: float,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int = 0,
        preemptions: int = 0,
    ) -> None:
        """Record that the answer is complete."""
        with self._lock:
            entry = self._entries[submission_id]
            if entry.end is None:
                entry.end = now - self.origin
                entry.prompt_tokens, entry.output_tokens = prompt_tokens, output_tokens
                entry.cached_tokens, entry.preemptions = cached_tokens, preemptions

    def failed(self, submission_id: str, now: float, reason: str) -> None:
        """Record a failure; later outputs of the request are ignored."""
        with self._lock:
            entry = self._entries[submission_id]
            if entry.end is None:
                entry.end, entry.error = now - self.origin, reason

    def answered(self, submission_id: str) -> bool:
        """Whether it has a complete answer."""
        with self._lock:
            entry = self._entries[submission_id]
            return entry.end is not None and entry.error is None

    def records(self) -> tuple[RequestRecord, ...]:
        """All requests sent, in the workload's order; unanswered ones are failures."""
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda e: (e.request.at, e.request.id))
            repeated = repeated_tokens(e.request for e in entries)
            return tuple(_record(e, n) for e, n in zip(entries, repeated, strict=True))


def _record(entry: _Entry, repeated: int) -> RequestRecord:
    complete = entry.end is not None and entry.error is None
    error = "not answered by the end of the run" if entry.end is None else entry.error
    first = entry.token_times[0] if entry.token_times else (entry.end if complete else None)
    times = entry.token_times
    if entry.end is None:
        times = times[:]  # it may go on
    elif complete and len(times) > entry.output_tokens:
        # Over HTTP the end of an answer may come as a chunk of its own, of text held back till then
        times = times[: entry.output_tokens]
    return RequestRecord(
        id=entry.request.id,
        model=entry.request.model,
        at=entry.request.at,
        sent=entry.sent,
        first_token=first,
        end=entry.end,
        prompt_tokens=entry.prompt_tokens if complete else entry.request.prompt_tokens,
        output_tokens=entry.output_tokens if complete else len(entry.token_times),
        token_times=times,
        cached_tokens=entry.cached_tokens,
        repeated_tokens=repeated,
        preemptions=entry.preemptions,
        error=error,
    )
