"""Let one piece of work of all API keys run at a time, taking the keys in turn.

Used on an event loop by `json_route` (bodies), `text.chat_template` (templates) and
`generate.output_constraint` (a thread that checks grammars), so that no key waits for all requests
of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ballast.core.fairqueue import FairQueue
from ballast.server.http.faults import Fault

T = TypeVar("T")


class TurnRefused(Exception):
    """Too much work waits already; the message says of whom."""


class FairTurns:
    """A lock whose waiters are served key by key; used from one event loop at a time."""

    def __init__(self, most_each: int = sys.maxsize, most: int = sys.maxsize) -> None:
        """`most_each`, `most`: bounds of the waiters, of one API key and in all."""
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(most_each, most)
        self._busy = False

    async def acquire(self, key: str) -> None:
        """Wait for the turn of `key` (the name of an API key), which lasts until `release`.

        Raises TurnRefused where a bound is reached.
        """
        if self._busy:
            turn = asyncio.get_running_loop().create_future()
            refusal = self._waiting.put(key, turn)
            if refusal is not None:
                raise TurnRefused(refusal)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self.release()  # its turn came at the same time
                else:
                    with contextlib.suppress(KeyError, ValueError):  # passed over already
                        self._waiting.remove(key, turn)
                raise
        self._busy = True

    def release(self) -> None:
        """End the present turn; the next one begins."""
        turn = self._waiting.take()
        while turn is not None and turn.cancelled():  # who waited has left
            turn = self._waiting.take()
        self._busy = turn is not None
        if turn is not None:
            turn.set_result(None)

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Hold a turn. Raises TurnRefused."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release()


class FairThread:
    """One thread that runs work for several API keys in turn; used from one event loop at a
    time."""

    def __init__(self, name: str, most_each: int, most: int) -> None:
        """`name`: of the thread, and of its work in errors to clients. `most_each`, `most`: bounds
        of the waiting pieces of work, of one API key and in all."""
        self._name = name
        self._thread = ThreadPoolExecutor(1, name)
        self._turns = FairTurns(most_each, most)

    async def run(self, key: str, work: Callable[[], T]) -> T:
        """Run `work` on the thread when it is the turn of `key` (the name of an API key); returns
        its result.

        Raises Fault (429) where the queue is full.
        """
        try:
            await self._turns.acquire(key)
        except TurnRefused as refusal:
            raise Fault(429, f"{self._name}: {refusal}", "queue_full") from refusal
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(done)  # a cancelled caller does not free the thread
