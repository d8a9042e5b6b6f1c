"""Run work of all API keys on one thread, taking the keys in turn, with bounded queues.

`generate.output_constraint` checks clients' grammars on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ballast.core.fairqueue import FairQueue
from ballast.server.http.faults import Fault

T = TypeVar("T")


class FairThread:
    """One thread of its own, used from one event loop at a time."""

    def __init__(self, name: str, most_each: int, most: int) -> None:
        """`name`: of the thread, and of what it does, for clients. `most_each`, `most`: pieces of
        work that wait, of one API key and in all."""
        self._name = name
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(most_each, most)
        self._busy = False

    async def run(self, key: str, work: Callable[[], T]) -> T:
        """The result of `work`, done when it is the turn of `key` (the name of an API key).

        Raises Fault (429) where too many wait already.
        """
        loop = asyncio.get_running_loop()
        if self._busy:
            turn = loop.create_future()
            refusal = self._waiting.put(key, turn)
            if refusal is not None:
                raise Fault(429, f"{self._name}: {refusal}", "queue_full")
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was its turn just now
                else:
                    self._waiting.remove(key, turn)
                raise
        self._busy = True
        done = loop.run_in_executor(self._thread, work)
        done.add_done_callback(lambda _: self._next())
        return await asyncio.shield(done)  # who leaves does not make the thread free

    def _next(self) -> None:
        """The thread is free: whose turn it is goes on."""
        turn = self._waiting.take()
        self._busy = turn is not None
        if turn is not None:
            turn.set_result(None)
