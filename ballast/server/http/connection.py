"""Choose the event loop and HTTP parser: uvloop and httptools, where installed, else Python's own.

Used by `server.serve`, which runs uvicorn on this loop with this parser. With either parser,
heads of requests are bounded, offers to upgrade ignored, and HTTP/1.0 is answered without chunks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

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
    return bounded(without_upgrades(unchunked(HttpToolsProtocol)))


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


def without_upgrades(base: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    """Ignore offers to upgrade, as RFC 9110, 7.8 allows: Java's client offers `h2c` with every
    request, and httptools takes what follows the head for the other protocol."""
    from httptools import HttpParserUpgrade, HttpRequestParser

    class Parser(HttpRequestParser):
        """Read a head that offers an upgrade a second time, without the offer."""

        def __init__(self, protocol: WithoutUpgrades) -> None:
            super().__init__(protocol)
            self.protocol = protocol
            self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

        def offers_upgrade(self) -> bool:
            return self.should_upgrade() and self.get_method() != b"CONNECT"

        def feed_data(self, data: Any) -> None:
            rest = memoryview(data)
            while True:
                try:
                    return super().feed_data(rest)
                except HttpParserUpgrade as stopped:
                    if not self.offers_upgrade():
                        raise
                    rest = rest[stopped.args[0] :]
                head = self.head()
                Parser.__init__(self, self.protocol)  # after `Connection: close` it reads no more
                super().feed_data(head)

        def head(self) -> bytes:
            """Return the head that was read without `Upgrade`: `Connection` offers nothing."""
            version = self.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (self.get_method(), self.protocol.url, version)]
            lines += [
                b"%b: %b" % header for header in self.protocol.headers if header[0] != b"upgrade"
            ]
            return b"\r\n".join(lines) + b"\r\n\r\n"

    class WithoutUpgrades(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.parser = Parser(self)

        def on_headers_complete(self) -> None:
            if not self.parser.offers_upgrade():
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self.parser.offers_upgrade():
                super().on_message_complete()

    return WithoutUpgrades


def unchunked(base: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    """Answer HTTP/1.0 without chunks (RFC 9112, 6.1): that the connection closes ends the body."""

    class Unchunked(base):  # type: ignore[misc, valid-type]
        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                send_until_close(self.cycle)

    return Unchunked


def send_until_close(cycle: RequestResponseCycle) -> None:
    """Let the cycle send each part of a body as it is, whether or not a length was announced."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_as_is(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_as_is  # type: ignore[method-assign]
