"""Buffer the outputs of one client's requests, with backpressure, and record each open request.

Written by `OpenRequests`, read by the server's generation and embedding code. A slow client bounds
its own memory: a stream that holds too many unread outputs has its requests paused, and resumed
when they have been read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ballast.core.errors import BrokenPromise
from ballast.core.event import EmbeddingOutput, Output, PromptScoresOutput, TokenOutput
from ballast.core.request import Submission

MOST_UNREAD, MOST_UNREAD_EACH = 1024, 64
"""Units (`size`) that a stream holds before its requests are paused: a fixed number, and a further
number for each request. A unit takes about 150 bytes, both here and as JSON."""
UNITS_PER_TAKE = 256
"""Units returned by one `take`; the last output may exceed it."""


def size(output: Output) -> int:
    """Return the units of an output: one for a token and one for each of its alternatives."""
    match output:
        case TokenOutput():
            return 1 + len(output.top)
        case PromptScoresOutput():
            return len(output.logprobs) + sum(map(len, output.top))
        case EmbeddingOutput():
            return 1 + len(output.values) // 128
        case _:
            return 1


class OutputStream:
    """The outputs of one client's requests, in order, for one reader.

    Beyond `most` units its requests are paused; outputs of steps in flight may still be added.
    """

    def __init__(
        self,
        request_ids: Iterable[str],
        withdraw: Callable[[Sequence[str]], None],
        pace: Callable[[Sequence[str], bool], None],
    ) -> None:
        """`withdraw(ids)`: ends requests; `pace(ids, paused)`: pauses or resumes them."""
        self._withdraw = withdraw
        self._pace = pace
        self.open = set(request_ids)
        """Ids of the requests that have not ended."""
        self.most = MOST_UNREAD + MOST_UNREAD_EACH * len(self.open)
        self.unread = 0
        """Units (`size`) of the outputs that it holds."""
        self.paused = False
        """Whether its requests are paused: from more than `most` units until less than a quarter of
        them."""
        self._outputs: deque[Output] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Resolved when there is an output; None while no reader waits."""

    @property
    def more(self) -> bool:
        """Whether further outputs will come or are held."""
        return bool(self.open or self._outputs)

    async def take(self, patience: float | None = None) -> list[Output]:
        """Return the next outputs, of about UNITS_PER_TAKE units at most.

        Waits for one for up to `patience` seconds (None: without limit), after which the list is
        empty. Must not be called without `patience` when there is no `more`.
        """
        if not self._outputs:
            await self._one(patience)
        if self.unread <= UNITS_PER_TAKE:
            outputs, self.unread = [*self._outputs], 0
            self._outputs.clear()
        else:
            outputs, left = [], UNITS_PER_TAKE
            while left > 0:
                outputs.append(self._outputs.popleft())
                left -= size(outputs[-1])
            self.unread -= UNITS_PER_TAKE - left
            await asyncio.sleep(0)  # the loop's other work, between two parts of much
        if self.paused and self.unread < self.most / 4:
            self.paused = False
            self._pace([*self.open], False)
        return outputs

    async def _one(self, patience: float | None) -> None:
        # Runs for every token: `asyncio.timeout` would take longer than everything else here.
        loop = asyncio.get_running_loop()
        reader = self._reader = loop.create_future()
        timer = None if patience is None else loop.call_later(patience, _wake, reader)
        try:
            await reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def put(self, output: Output) -> None:
        """Append an output and wake the reader; called by the device's `OpenRequests`."""
        self._outputs.append(output)
        self.unread += size(output)
        if self.unread > self.most and not self.paused:
            self.paused = True
            self._pace([*self.open], True)
        if self._reader is not None:
            _wake(self._reader)

    def withdraw(self, request_id: str) -> None:
        """Withdraw one request; its memory is freed at the end of the step in flight."""
        if request_id in self.open:
            self._withdraw([request_id])

    def close(self) -> None:
        """Withdraw all open requests."""
        self._withdraw(list(self.open))


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request until its end, with the state needed to continue it in another worker."""

    submission: Submission
    stream: OutputStream
    key: str = ""
    """Name of its API key where keys have fair shares of the worker; else empty."""
    activations_per_minute: int | None = None
    """Activations of models that its key may cause in a minute on each device; None: no bound."""
    sent: bool = False
    """Whether the present worker has it."""
    begun: bool = False
    """Whether the present device has generated a token of it and has a full block of its KV."""
    departing: bool = False
    """Whether it is moving to another device: its end at the present worker is not delivered."""
    paused: bool = False
    """Whether it is paused because its client does not read: it is not sent, or its worker has
    paused it."""
    resuming: bool = False
    """Whether its worker has paused it and is to resume it, which may wait until its key may have
    its model activated."""
    fresh: bool = True
    """Whether it has never been sent to a worker."""
    accepted: bool = False
    """Whether it has been accepted: no queue limit may refuse it any more."""
    arrived: float = field(default_factory=time.monotonic)
    """When it arrived, on this process's clock."""
    first_token: float | None = None
    """When its client got its first token, on the same clock."""
    output_tokens: list[int] = field(default_factory=list)
    """Output tokens that the client has."""
    vocab: int | None = None
    """Number of its model's tokens; None: unknown."""
    expiry: asyncio.TimerHandle | None = None
    """Timer that fails it, if it has not been sent by then."""
    scored: int = 0
    """Leading prompt positions whose scores the client has; position 0, which has none, counts."""
    embedded: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the worker has it and has not paused it."""
        return self.sent and not (self.paused or self.resuming)

    def cancel_expiry(self) -> None:
        """Cancel the timer that fails the request for waiting too long."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def next_submission(self) -> Submission:
        """Build the submission for the present worker, which continues after the tokens that the
        client has; mark the request as sent."""
        submission = self.submission
        if self.accepted:
            now = time.monotonic()
            submission = replace(
                submission,
                resumed=tuple(self.output_tokens),
                age=now - self.arrived,
                first_token_age=None if self.first_token is None else now - self.first_token,
            )
        self.sent, self.fresh, self.accepted = True, False, True
        self.cancel_expiry()
        return submission

    def _check_tokens(self, output: TokenOutput) -> None:
        if self.vocab is not None:
            for token in (output.token, *(token for token, _ in output.top)):
                if not 0 <= token < self.vocab:
                    named = f"{output.request_id} was given token {token}"
                    raise BrokenPromise(f"{named}; {self.submission.model} has {self.vocab}")

    def undelivered_part(self, output: Output) -> Output | None:
        """Return the part of an output that the client does not have yet; None: it has all of it.

        Raises BrokenPromise for a gap in the tokens, and for a token outside of the vocabulary.
        """
        match output:
            case TokenOutput():
                self._check_tokens(output)
                if output.index < len(self.output_tokens):
                    return None
                if output.index > len(self.output_tokens):
                    known = len(self.output_tokens)
                    raise BrokenPromise(
                        f"token {output.index} of {output.request_id} came after {known}"
                    )
                self.output_tokens.append(output.token)
                if self.first_token is None:
                    self.first_token = time.monotonic()
            case PromptScoresOutput():
                end = output.start + len(output.logprobs)
                known = max(0, min(self.scored, end) - output.start)
                self.scored = max(self.scored, end)
                if known == len(output.logprobs) > 0:
                    return None
                if known:
                    return replace(
                        output,
                        start=output.start + known,
                        logprobs=output.logprobs[known:],
                        top=output.top[known:],
                    )
            case EmbeddingOutput():
                if self.embedded:
                    return None
                self.embedded = True
            case _:
                pass
        return output
