"""Keep one warmed-up worker process in reserve, to replace a worker that dies.

One spare for all devices of a server: the controller prepares it, `RemoteDevice` takes it. It has
no device until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ballast.core.errors import BallastError

log = logging.getLogger(__name__)


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

        One that is not ready is ended.
        """
        async with self._changing:
            worker = self._worker
            if worker is not None and worker.waits:
                self._worker = self._preparing = None
                return worker
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
