"""A worker process that waits, its libraries loaded, to take the place of one that dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ballast.core.errors import BallastError

log = logging.getLogger(__name__)


FIRST_WORD_SECONDS = 30.0
"""A process that starts may be silent for so long."""


class Preparable(Protocol):
    """What of a worker matters here."""

    @property
    def waits(self) -> bool: ...

    async def prepare(self) -> None: ...

    async def close(self, patience: float = 0.0) -> None: ...


W = TypeVar("W", bound=Preparable)


class Spare(Generic[W]):
    """At most one; to be used on one event loop."""

    def __init__(self, make_worker: Callable[[], W]) -> None:
        self._make_worker = make_worker
        self._worker: W | None = None
        self._preparing: asyncio.Task[None] | None = None

    async def hire(self) -> None:
        """Start one in the background, unless one waits or is about to."""
        if self._preparing is not None and not self._preparing.done():
            return
        if self._worker is not None and self._worker.waits:
            return
        await self.close()
        try:
            self._worker = self._make_worker()
        except (BallastError, OSError) as error:
            log.warning("no spare worker: %s", error)
            return
        self._preparing = asyncio.create_task(self._prepare(self._worker))

    async def _prepare(self, worker: W) -> None:
        try:
            await worker.prepare()
        except (BallastError, OSError) as error:
            log.warning("no spare worker: %s", error)

    async def take(self) -> W | None:
        """The one that waits, whose caller it is from now on."""
        if self._preparing is not None:  # a new one would take longer
            await asyncio.wait({self._preparing}, timeout=FIRST_WORD_SECONDS)
        worker = self._worker
        if worker is not None and worker.waits:
            self._worker = self._preparing = None
            return worker
        await self.close()
        return None

    async def close(self) -> None:
        """End it."""
        if self._preparing is not None:
            self._preparing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._preparing
        if self._worker is not None:
            await self._worker.close()
        self._worker = self._preparing = None
