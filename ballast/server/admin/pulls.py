"""Download models from the hub at clients' request, as far as the operator allows, and serve them.

Used by Ollama's `/api/pull`. Without `server.pull` in the fleet file nothing is downloaded. A child
process downloads (`ballast pull`): it ends with the client's connection, and one runs at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from ballast.core.settings import PullSettings
from ballast.fleet.hub import is_hub_id
from ballast.fleet.schema import NamedModelKeys
from ballast.server.admin.admin_service import AdminService
from ballast.server.http.faults import Fault

HUBS = ("hf.co/", "huggingface.co/", "hf:")
"""What may stand before a hub id: hosts that Ollama's clients name, and the fleet file's mark."""


class PullProgress(NamedTuple):
    """How far a download is, in bytes."""

    completed: int
    total: int


class Pulls:
    """Downloads and adds models; the routes of all clients share one."""

    def __init__(
        self,
        admin: AdminService,
        settings: Callable[[], PullSettings],
        command: tuple[str, ...] = (sys.executable, "-m", "ballast", "pull"),
    ) -> None:
        self._admin, self._settings, self._command = admin, settings, command
        self._running = asyncio.Lock()

    def allows(self, name: str) -> bool:
        """Whether clients may have the model of this name downloaded."""
        hub_id = _hub_id(name)
        return (
            "@" not in name
            and is_hub_id(hub_id)
            and any(fnmatchcase(hub_id, pattern) for pattern in self._settings().models)
        )

    async def pull(self, name: str) -> AsyncIterator[PullProgress]:
        """Download a model that clients may have, and serve it by `name`; yields how far it is.
        Raises Fault, Unavailable or NotKept."""
        settings = self._settings()
        if self._running.locked():
            raise Fault(429, "another model is being pulled; try again later", "busy")
        async with self._running:
            if len(self._admin.changes.added) >= settings.most_models:
                why = f"{settings.most_models} models have been added already"
                raise Fault(403, why, "forbidden", "model")
            hub_id = _hub_id(name)
            async for step in self._download(hub_id, settings.most_bytes):
                yield step
            await self._admin.add(NamedModelKeys(name=name, path=f"hf:{hub_id}"))

    async def _download(self, hub_id: str, most_bytes: int) -> AsyncIterator[PullProgress]:
        child = await asyncio.create_subprocess_exec(
            *(*self._command, "--json", "--most", str(most_bytes), hub_id),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        errors = asyncio.ensure_future(child.stderr.read())
        try:
            async for line in child.stdout:
                found = json.loads(line)
                yield PullProgress(found["completed"], found["total"])
            if await child.wait() != 0:
                last = (await errors).decode(errors="replace").strip().splitlines()[-1:]
                raise Fault(400, f"{hub_id}: {' '.join(last)}", "invalid_request", "model")
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            errors.cancel()


def _hub_id(name: str) -> str:
    for hub in HUBS:
        name = name.removeprefix(hub)
    return name
