"""Keep one warmed-up worker process in reserve on a host, to replace a worker that dies.

One spare for all devices of a host: the controller has it prepared, `RemoteDevice` takes it. It has
no device until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ballast.cluster.worker.worker_link import WorkerLink
from ballast.core.errors import BallastError

log = logging.getLogger(__name__)


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

    def waits(self, device: str) -> bool:
        return False

    async def set_drained(self, host: str, drained: bool) -> list[str] | None:
        return None

    async def next(self, device: str) -> WorkerLink:
        return await self._spare.take() or self._make_worker()

    async def prepare(self) -> None:
        await self._spare.prepare()

    async def close(self) -> None:
        await self._spare.close()


class Preparable(Protocol):
    """A worker that can be started ahead of time; `LocalWorker` is one."""

    @property
    def waits(self) -> bool: ...

    async def prepare(self) -> None: ...

    async def close(self, patience: float = 0.0) -> None: ...


W = TypeVar("W", bound=Preparable)


class SpareWorker(Generic[W]):
    """Holds at most one prepared worker; used on one event loop."""

    def __init__(self, make_worker: Callable[[], W]) -> None:
        self._make_worker = make_worker
        self._worker: W | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def prepare(self) -> None:
        """Start a worker in the background, unless one waits or is being prepared."""
        async with self._changing:
            if self._preparing is not None and not self._preparing.done():
                return
            if self.waits:
                return
            await self._close()
            try:
                self._worker = self._make_worker()
            except (BallastError, OSError) as error:
                log.warning("no spare worker: %s", error)
                return
            self._preparing = asyncio.create_task(self._wait_until_prepared(self._worker))

    @property
    def waits(self) -> bool:
        """Whether a worker is ready to be taken."""
        return self._worker is not None and self._worker.waits

    async def _wait_until_prepared(self, worker: W) -> None:
        try:
            await worker.prepare()
        except (BallastError, OSError) as error:
            log.warning("no spare worker: %s", error)

    async def take(self) -> W | None:
        """Return the worker that is ready, which the caller then owns; None if there is none.

        One that is being prepared goes on, for the next caller: at the lowest priority that takes
        minutes on a busy host, and workers that die one after the other would never find a spare.
        """
        async with self._changing:
            worker = self._worker
            if worker is not None and worker.waits:
                self._worker = self._preparing = None
                return worker
            if self._preparing is None or self._preparing.done():  # it could not be prepared
                await self._close()
            return None

    async def close(self) -> None:
        """End the worker, if there is one."""
        async with self._changing:
            await self._close()

    async def _close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._preparing
        if self._worker is not None:
            await self._worker.close()
        self._worker = self._preparing = None
