"""Counts the requests being answered, and lets none in while the server drains."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from ballast.server.faults import Fault

_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")


class Gate:
    """ASGI middleware before the routes that generate; the others always pass."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.open = 0
        """Requests whose response is not complete."""
        self.draining = False
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _GENERATES:
            await self._app(scope, receive, send)
            return
        if self.draining:
            fault = Fault(503, "the server is draining; it takes no new requests", "unavailable")
            await fault.response()(scope, receive, send)
            return
        self.open += 1
        self.idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.open -= 1
            if self.open == 0:
                self.idle.set()
