"""Name servers to a process that outlives them: lines of JSON on its standard input.

Written by what has started the process (an actor of Ray), read by agents and relays.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import msgspec


class Server(msgspec.Struct, frozen=True):
    """Where the server is."""

    address: str
    key: str
    """Its public key."""


class ServerInbox:
    """The latest server that the parent has named."""

    def __init__(self) -> None:
        self._latest: Server | None = None
        self._named = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True).start()

    async def take(self, seconds: float) -> Server | None:
        """Return a server that has not been returned yet; None: none was named in time."""
        try:
            await asyncio.wait_for(self._named.wait(), seconds)
        except TimeoutError:
            return None
        self._named.clear()
        return self._latest

    def _read(self) -> None:
        for line in sys.stdin:
            self._loop.call_soon_threadsafe(self._note, msgspec.json.decode(line, type=Server))

    def _note(self, server: Server) -> None:
        self._latest = server
        self._named.set()
