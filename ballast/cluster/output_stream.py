"""Buffer the outputs of one client's requests, with backpressure.

Written by `OpenRequests`, read by the server's generation and embedding code. A slow client bounds
its own memory: a stream that holds too many unread outputs has its requests paused, and resumed
when they have been read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ballast.core.event import EmbeddingOutput, Output, PromptScoresOutput, TokenOutput

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
