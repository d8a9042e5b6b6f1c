"""Answer CORS preflights and add CORS headers, for the origins in the server's settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ballast.core.settings import ServerSettings

METHODS = ("GET", "POST", "PATCH", "DELETE")
READABLE = (
    "retry-after",
    "x-ballast-left-out",
    "x-request-id",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
)
"""Response headers that pages may read beside those that CORS always allows."""
PREFLIGHT_SECONDS = 600
"""Seconds for which browsers may cache the answer to a preflight."""


class Cors:
    """ASGI middleware that adds CORS headers, and answers preflights, which carry no key.

    It is placed before the check of keys, so that pages can read errors about keys. Without
    configured origins it does nothing. Cookies are not allowed: keys are sent in headers.
    """

    def __init__(self, app: ASGIApp, settings: Callable[[], ServerSettings]) -> None:
        self._app = app
        self._settings = settings
        self._of = lru_cache(1)(self._allowing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._settings().cors_origins
        app = self._of(origins) if origins else self._app
        await app(scope, receive, send)

    def _allowing(self, origins: tuple[str, ...]) -> ASGIApp:
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=READABLE,
            max_age=PREFLIGHT_SECONDS,
        )
