"""Jobs that wait: what a test does in the midst of an answer, it does there on any machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ballast.bench.inprocess import InProcess
from ballast.core.event import JobResult, Output, TokenOutput
from ballast.core.job import SequenceWork
from ballast.live.runner import Executor

DEADLINE = 240.0
"""Seconds after which a test gives up."""


@contextmanager
def held(server: InProcess, index: int, request_id: str) -> Iterator[Callable[[], None]]:
    """Hold the first job that starts after that token of a request has come, and all later ones.

    Gives what returns once a job is held; they run on when the context is left.
    """
    wanted, reached, go = threading.Event(), threading.Event(), threading.Event()

    def listen(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput) and (output.request_id, output.index) == (
            request_id,
            index,
        ):
            wanted.set()

    def holding(run: Callable[[Sequence[SequenceWork]], list[JobResult]]) -> object:
        def wait_and_run(work: Sequence[SequenceWork]) -> list[JobResult]:
            if wanted.is_set():
                reached.set()
                assert go.wait(DEADLINE)
            return run(work)

        return wait_and_run

    def until_held() -> None:
        assert reached.wait(DEADLINE)

    executors: dict[int, Executor] = {
        id(e): e for of in server.device.executors.values() for e in of
    }
    for executor in executors.values():
        executor.run = holding(executor.run)  # type: ignore[method-assign, assignment]
    server.listen = listen
    try:
        yield until_held
    finally:
        server.listen = None
        go.set()


def until(what: Callable[[], bool]) -> None:
    """Returns when `what` holds; fails after the deadline."""
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)
