"""Work in turns: API keys alternate, too much is refused, and who leaves holds nobody up."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from ballast.server.http.fair_turns import FairThread, FairTurns
from ballast.server.http.faults import Fault

DEADLINE = 240.0


class Work:
    """Done in order of turns, as a test lets it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may = threading.Semaphore(0)

    def __call__(self, name: str) -> str:
        assert self.may.acquire(timeout=DEADLINE)
        self.done.append(name)
        return name


def test_keys_take_turns_and_too_many_are_refused() -> None:
    async def scenario() -> None:
        turns, work = FairThread("grammars", most_each=3, most=4), Work()

        def asked(key: str, name: str) -> asyncio.Task[str]:
            return asyncio.ensure_future(turns.run(key, lambda: work(name)))

        running = [asked("x", f"x{i}") for i in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Fault, match="grammars: 3 of the same API key wait") as caught:
            await turns.run("x", lambda: work("never"))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        running.append(asked("y", "y0"))
        await asyncio.sleep(0)
        with pytest.raises(Fault, match="grammars: 4 wait already"):
            await turns.run("z", lambda: work("never"))
        work.may.release(10)
        assert await asyncio.gather(*running) == ["x0", "x1", "x2", "x3", "y0"]
        assert work.done == ["x0", "x1", "y0", "x2", "x3"]
        assert await turns.run("x", lambda: work("later")) == "later"

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_who_leaves_holds_nobody_up() -> None:
    async def scenario() -> None:
        turns, work = FairThread("grammars", most_each=8, most=8), Work()
        tasks = [
            asyncio.ensure_future(turns.run("x", lambda i=i: work(str(i))))  # type: ignore[misc]
            for i in range(4)
        ]
        await asyncio.sleep(0)
        for gone in (0, 2):  # the one at work, and one that waits
            tasks[gone].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tasks[gone]
        work.may.release(10)
        assert await tasks[1] == "1"
        assert await tasks[3] == "3"
        assert work.done == ["0", "1", "3"]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_work_that_ends_as_the_next_client_leaves_frees_the_thread() -> None:
    """The next one's cancellation has begun, but it has not left the queue yet."""

    async def scenario() -> None:
        turns = FairTurns()
        await turns.acquire("x")
        late = asyncio.ensure_future(turns.acquire("x"))
        await asyncio.sleep(0)
        late.cancel()
        turns.release()
        with pytest.raises(asyncio.CancelledError):
            await late
        await turns.acquire("x")

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_a_turn_that_comes_when_its_client_leaves_is_the_next_ones() -> None:
    async def scenario() -> None:
        turns, work = FairThread("grammars", most_each=8, most=8), Work()
        first = asyncio.ensure_future(turns.run("x", lambda: work("first")))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(turns.run("x", lambda: work("late")))
        after = asyncio.ensure_future(turns.run("x", lambda: work("after")))
        await asyncio.sleep(0)
        work.may.release(10)
        first.add_done_callback(lambda _: late.cancel())
        assert await first == "first"
        assert await after == "after"
        with contextlib.suppress(asyncio.CancelledError):
            await late

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_work_that_raises_leaves_the_thread_free() -> None:
    async def scenario() -> None:
        turns = FairThread("grammars", most_each=1, most=1)
        with pytest.raises(ZeroDivisionError):
            await turns.run("x", lambda: 1 / 0)
        assert await turns.run("x", lambda: 5) == 5

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
