"""Keep one warmed-up worker process in reserve on a host, to replace a worker that dies.

One spare for all devices of a host: the controller has it prepared, `RemoteDevice` takes it. It has
no device until then. `SpareWorker` drives the state machine `control.spares`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ballast.cluster.worker.liveness_watch import Activity
from ballast.cluster.worker.worker_link import WorkerLink
from ballast.control.spares import (
    EndSpare,
    PrepareSpare,
    SpareActiveEvent,
    SpareDueEvent,
    SpareEndedEvent,
    SpareEvent,
    SparePreparedEvent,
    Spares,
    SpareWantedEvent,
)
from ballast.core.errors import BallastError
from ballast.core.migration import Piece
from ballast.core.settings import ServerSettings

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
"""Ticks in which the kernel counts processor time."""


class LocalWorkers:
    """Workers of this host, with one spare for all devices."""

    def __init__(self, make_worker: Callable[[], WorkerLink]) -> None:
        self._make_worker = make_worker
        self._first: list[WorkerLink] = []
        self._spare: SpareWorker[WorkerLink] = SpareWorker(make_worker)

    def first(self, device: str) -> WorkerLink:
        self._first.append(self._make_worker())
        return self._first[-1]

    async def begin(self) -> None:
        """Start the processes of all devices' first workers, which import while the server does."""
        for worker in self._first:
            with contextlib.suppress(OSError):  # tried again when the device starts
                await worker.begin()

    def host_of(self, device: str) -> str:
        return ""

    def offer_kv(self, device: str, reader: str, address: str, pieces: Sequence[Piece]) -> str:
        return address

    def stands_by(self, device: str) -> bool:
        return False

    def want(self, device: str, wanted: bool) -> None:
        pass

    def waits(self, device: str) -> bool:
        return False

    async def set_drained(self, host: str, drained: bool) -> list[str] | None:
        return None

    async def next(self, device: str) -> WorkerLink:
        return self._spare.take() or self._make_worker()

    async def prepare(self, limits: ServerSettings) -> None:
        self._spare.prepare(limits)

    async def close(self) -> None:
        await self._spare.close()


class Preparable(Protocol):
    """A worker that can be started ahead of time; `LocalWorker` is one."""

    @property
    def waits(self) -> bool: ...

    def activity(self) -> Activity | None: ...

    async def prepare(self) -> None: ...

    async def close(self, patience: float = 0.0) -> None: ...


W = TypeVar("W", bound=Preparable)


class SpareWorker(Generic[W]):
    """Holds at most one prepared worker; used on one event loop, never blocked by a worker."""

    def __init__(self, make_worker: Callable[[], W], tick: float = TICK_SECONDS) -> None:
        """`tick`: seconds between two looks at the worker."""
        self._make_worker, self._tick = make_worker, tick
        limits = ServerSettings()
        self._machine = Spares(limits.starting_seconds, limits.loading_seconds)
        self._now = 0.0
        """Seconds in ticks: time in which the server itself was held up does not count."""
        self._worker: W | None = None
        self._number = 0
        self._activity: Activity | None = None
        """Of the worker, at the last look."""
        self._preparing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """Ends of workers that were given up."""

    def prepare(self, limits: ServerSettings) -> None:
        """Keep a worker from now on: start one unless one waits or is being prepared. `limits`: one
        that uses no processor time for `starting_seconds` is killed, and so is one that uses
        `loading_seconds` of it."""
        self._machine.idle_seconds = limits.starting_seconds
        self._machine.busy_seconds = limits.loading_seconds
        self._look()
        self._handle(SpareWantedEvent())
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    @property
    def waits(self) -> bool:
        """Whether a worker is ready to be taken."""
        worker, ready = self._worker, self._machine.ready is not None
        return ready and worker is not None and worker.waits

    def take(self) -> W | None:
        """Return the worker that is ready, which the caller then owns; None if there is none. As of
        `Spares.take`."""
        self._look()
        if self._machine.take() is None:
            return None
        worker, self._worker, self._preparing = self._worker, None, None
        return worker

    async def close(self) -> None:
        """End the worker, if there is one, and keep none any more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        self._give_up()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            self._now += self._tick
            self._look()
            self._handle(SpareDueEvent())

    def _look(self) -> None:
        """Note what the worker has done since the last look."""
        worker = self._worker
        if worker is None:
            return
        if self._machine.ready is None:
            activity = worker.activity()
            if activity is not None and activity != self._activity:
                self._activity = activity
                self._handle(SpareActiveEvent(self._number, activity[0] / TICKS_PER_SECOND))
        elif not worker.waits:
            self._handle(SpareEndedEvent(self._number, "it ended while it waited"))

    def _handle(self, event: SpareEvent) -> None:
        if isinstance(event, SpareEndedEvent) and event.number == self._number:
            log.warning("no spare worker: %s", event.why)
            self._give_up()
        for instruction in self._machine.handle(self._now, event):
            match instruction:
                case PrepareSpare(number):
                    self._start(number)
                case EndSpare(_, why):
                    log.warning("a spare worker is killed: %s", why)
                    self._give_up()

    def _start(self, number: int) -> None:
        self._number, self._activity = number, None
        self._preparing = asyncio.create_task(self._prepare(number))

    async def _prepare(self, number: int) -> None:
        try:
            self._worker = self._make_worker()
            await self._worker.prepare()
        except (BallastError, OSError) as error:
            self._preparing = None
            self._handle(SpareEndedEvent(number, str(error) or type(error).__name__))
        else:
            self._handle(SparePreparedEvent(number))

    def _give_up(self) -> None:
        """Have the worker that there is ended, in the background."""
        worker, preparing = self._worker, self._preparing
        self._worker = self._preparing = None
        if preparing is not None:
            preparing.cancel()
        if worker is not None or preparing is not None:
            closing = asyncio.create_task(_end(worker, preparing))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


async def _end(worker: Preparable | None, preparing: asyncio.Task[None] | None) -> None:
    if preparing is not None:
        await asyncio.wait({preparing})
    if worker is not None:
        await worker.close()
