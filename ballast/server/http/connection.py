"""Choose the event loop and HTTP parser: uvloop and httptools, where installed, else Python's own.

Used by `server.serve`, which runs uvicorn on this loop with this parser. The head of a request is
bounded with either parser.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Most bytes of a request's line and headers, of the trailers after its body, or of a chunk's
header."""


def new_loop() -> asyncio.AbstractEventLoop:
    """Create uvloop's event loop, which spends half as much time on a token, or else Python's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def protocol() -> type[asyncio.Protocol]:
    """Return uvicorn's protocol class for HTTP: that of httptools, or else of h11.

    Both refuse heads of more than `HEAD_BYTES` plus the bytes of one read.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return H11Protocol
    return bounded(HttpToolsProtocol)


def bounded(base: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    """Bound the heads of requests: httptools itself accepts headers of any length and number."""

    class Bounded(base):  # type: ignore[misc, valid-type]
        unfinished = 0
        """Bytes received since the last that belonged to a body or ended a request."""

        def data_received(self, data: bytes) -> None:
            self.unfinished += len(data)
            super().data_received(data)
            if self.unfinished > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")

        def on_body(self, body: bytes) -> None:
            self.unfinished = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.unfinished = 0
            super().on_message_complete()

    return Bounded
