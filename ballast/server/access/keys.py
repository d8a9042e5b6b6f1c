"""Authenticate requests by API key or admin key, and refuse routes that the key does not open.

`Guard` is the ASGI middleware around `gate`. Keys are kept and compared as SHA-256 digests.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from ballast.core.settings import ServerSettings
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import ANYONE, STRANGER, Caller, context_of
from ballast.server.http.route_match import pattern_of

log = logging.getLogger(__name__)

FREE = ("/live", "/health", "/", "/page/{name}")
"""Routes that need no key: probes have none, nor has a browser that opens the page."""
_STATE = ("/admin/state", "/admin/requests", "/admin/live", "/admin/history")
"""Paths below `/admin` that can be read without an admin key where none is configured."""
_OF_ALL = ("/metrics", *_STATE)
"""Paths that report on all models: closed to keys that are limited to some models."""
_OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes beside those below `/admin` that need the admin key."""
_READING = ("GET", "HEAD")


class ApiKeys:
    """The server's API keys and admin key, as digests, and the routes that they open."""

    def __init__(self, settings: ServerSettings) -> None:
        self.replace(settings)

    def replace(self, settings: ServerSettings) -> None:
        """Use other keys from the next request on."""
        apart = settings.several_keys
        known = [(_digest(key.key.encode()), Caller(key, apart=apart)) for key in settings.keys]
        self._asked = bool(known)
        self._admin = settings.admin_key is not None
        if settings.admin_key is not None:
            known.append((_digest(settings.admin_key.encode()), Caller(admin=True)))
        self._known = tuple(known)

    @property
    def asked(self) -> bool:
        """Whether generating requires a key."""
        return self._asked

    def caller(self, presented: bytes | None) -> Caller:
        """Return the caller whose key was `presented`. A comparison takes equally long for right
        and wrong keys."""
        found = STRANGER if self._asked else ANYONE
        if presented is not None:
            digest = _digest(presented)
            for known, caller in self._known:
                if hmac.compare_digest(known, digest):
                    found = caller
        return found

    def check(self, caller: Caller, method: str, path: str) -> None:
        """Raise Fault (401, 403 or 404) where the route is not open to the caller; `path`: the
        pattern of the route, or the path of a request that no route serves."""
        if path in FREE:
            return
        if path in _OF_ALL and caller.key is not None and caller.key.models is not None:
            raise Fault(403, f"{path} is of all models, and this key is not", "forbidden")
        if path == "/admin" or path.startswith("/admin/") or path in _OPERATORS:
            self._check_admin(caller, method, path)
        elif not caller.known:
            raise _unauthorized("an API key is needed")
        elif self._asked and caller.admin and method not in _READING:
            raise Fault(403, "the admin key only reads here: use an API key", "forbidden")

    def _check_admin(self, caller: Caller, method: str, path: str) -> None:
        if self._admin:
            if caller.admin:
                return
            if caller.key is not None:
                raise Fault(403, "this needs the admin key", "forbidden")
            raise _unauthorized("the admin key is needed")
        if not (path in _STATE and method in _READING):
            why = "no admin key is configured, so there are no admin routes"
            raise Fault(404, f"{method} {path:.200}: {why}", "not_found")
        if not caller.known:
            raise _unauthorized("an API key is needed")


class Guard:
    """ASGI middleware that authenticates each request by its key, and refuses routes that the key
    does not open."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.caller = self._keys.caller(presented(scope["headers"]))
        try:
            pattern = pattern_of(scope)
            self._keys.check(context.caller, scope["method"], pattern)
        except Fault as fault:
            await fault.response(context)(scope, receive, send)
            return
        context.admitted = pattern not in FREE
        await self._app(scope, receive, send)


def warn_of_keys(server: ServerSettings, known: Iterable[str]) -> None:
    """Log a warning for keys that list unknown models: such a model may be added later, but more
    often its name is misspelt."""
    there = set(known)
    for key in server.keys:
        unknown = [name for name in key.models or () if name not in there]
        if unknown:
            log.warning("the key %r is for models that there are not: %s", key.name, unknown)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key in a request's headers: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    by_name = dict(headers)
    scheme, _, key = by_name.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return by_name.get(b"x-api-key")


def _digest(key: bytes) -> bytes:
    """Hash a key. All digests have one length, so that comparing them reveals nothing about a
    key's."""
    return sha256(key).digest()


def _unauthorized(why: str) -> Fault:
    how = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return Fault(401, f"{why}, and no valid one was given; {how}", "invalid_api_key")
