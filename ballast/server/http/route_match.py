"""Find the route of a request before any middleware decides by it, and refuse paths with control
characters.

A path and the route that serves it differ: a route's pattern may match more than the text that a
check compares (`$` matches before a line break). So who may do what is decided by the route's
pattern.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ballast.server.http.faults import Fault
from ballast.server.http.request_context import context_of

_KEY = "ballast.pattern"


class RouteMatch:
    """ASGI middleware that records the pattern of the route that will serve a request."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not scope["path"].isprintable():
                why = "the path has control characters"
                await Fault(400, why, "invalid_request").response(context_of(scope))(
                    scope, receive, send
                )
                return
            scope[_KEY] = self._pattern(scope)
        await self._app(scope, receive, send)

    def _pattern(self, scope: Scope) -> str | None:
        """Pattern of the first route that serves the request, or else, like Starlette, of the
        first with its path and other methods."""
        partial = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "path", None)
            if match is Match.PARTIAL and partial is None:
                partial = getattr(route, "path", None)
        return partial


def pattern_of(scope: Scope) -> str:
    """Pattern of the route that serves a request; the path itself where none does."""
    pattern: str | None = scope.get(_KEY)
    return scope["path"] if pattern is None else pattern
