"""Stream server-sent events, and stop work as soon as the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


def event(data: bytes, name: str = "") -> bytes:
    """Encode one event. `data` must hold no line break (JSON as msgspec writes it never does)."""
    named = f"event: {name}\n".encode() if name else b""
    return b"".join((named, b"data: ", data, b"\n\n"))


DONE = event(b"[DONE]")
PING = b": ping\n\n"
"""A comment, which readers of events skip; sent to keep a silent stream alive."""


def comment(text: str) -> bytes:
    """Encode a comment of one line, which readers of events skip."""
    return f": {' '.join(text.split())}\n\n".encode()


class ClientGone(Exception):
    """The client has closed its connection, and needs no response."""


async def unless_gone(receive: Receive, awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`; if the client leaves first, cancel it and raise ClientGone.

    The request's body must have been read.
    """
    work = asyncio.ensure_future(awaitable)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGone
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait({work, gone})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Response that sends `chunks` as they come, and stops at once when the client disconnects.

    `finish` is always called: after the last chunk, or when the client has left. The disconnect is
    awaited, not found by a failing write: a request that waits for memory writes nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], finish: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._chunks = chunks
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            self._finish()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class LineStream(EventStream):
    """The same of lines, each a JSON object."""

    media_type = "application/x-ndjson"
