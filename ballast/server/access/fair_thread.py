"""Run work of all API keys on one thread, taking the keys in turn, with bounded queues.

`generate.output_constraint` checks clients' grammars on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ballast.server.http.fair_turns import FairTurns, TurnRefused
from ballast.server.http.faults import Fault

T = TypeVar("T")


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
