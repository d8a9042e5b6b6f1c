"""Send a large body in slices: each when the client has read most of those before, and the event
loop's other work in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ballast.server.http.sse import ClientGone, unless_gone

SLICE_BYTES = 64 << 10


class SlicedResponse(Response):
    """JSON response whose body comes in parts, which may be made while it is sent.

    `finish` is always called: after the last part, or when the client has left.
    """

    media_type = "application/json"

    def __init__(
        self,
        parts: Iterable[bytes],
        length: int | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """`length`: of the body, in bytes; None: it is sent in chunks."""
        self.status_code = 200
        self.background = None
        self.init_headers({} if length is None else {"content-length": str(length)})
        self._parts = parts
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
        parts = iter(self._parts)
        part = next(parts, b"")
        for following in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
            part = following
        # The request is over as soon as the client has all of its answer.
        await send({"type": "http.response.body", "body": part, "more_body": False})


def slices(body: bytes) -> Iterator[bytes]:
    """Cut a body into parts."""
    view = memoryview(body)
    return (bytes(view[i : i + SLICE_BYTES]) for i in range(0, len(body), SLICE_BYTES))
