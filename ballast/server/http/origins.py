"""Refuse what a web page elsewhere makes a browser send: DNS rebinding, and requests of foreign
origins.

A page whose name resolves to this server's address (DNS rebinding) is of the same origin to its
browser: only `Host` shows it, and without keys nothing else would stop it. A page of another origin
may send simple requests without asking: `Origin` shows it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ballast.core.errors import ConfigError
from ballast.core.settings import ServerSettings
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import context_of

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:@/\\\s]+)(?::(?P<port>[0-9]{0,5}))?")
_SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: a page can send them, and browsers let it read no response."""
_PORTS = {"http": "80", "https": "443"}
_SHOWN = 80
"""Most characters of a header that an error repeats."""


class SameOrigin:
    """ASGI middleware that refuses foreign `Host` (421) and `Origin` (403) headers.

    Without keys `Host` must be a loopback name, an IP address or one of the settings' `hosts`; with
    keys, one of `hosts` where there are any. `Origin`, where a client sends it with a method that
    may change something, must be the server's own or one of `cors_origins`.
    """

    def __init__(
        self, app: ASGIApp, settings: Callable[[], ServerSettings], bound: Collection[str] = ()
    ) -> None:
        """`bound`: name of the address that the server listens on, as the operator wrote it."""
        self._app = app
        self._settings = settings
        self._bound = frozenset(name.lower() for name in bound)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Fault as fault:
                await fault.response(context_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        settings = self._settings()
        hosts = _values(scope, b"host")
        if len(hosts) > 1 or (not hosts and scope.get("http_version") != "1.0"):
            raise Fault(400, "a request has one Host header", "invalid_request", "host")
        host = hosts[0] if hosts else None
        if host is not None:
            self._check_host(host, settings)
        origins = () if scope["method"] in _SAFE else _values(scope, b"origin")
        for origin in origins:
            if not (_allowed(origin, settings) or _same(origin, host)):
                raise Fault(
                    403,
                    f"pages of the origin {origin[:_SHOWN]!r} may not use this server: name it in "
                    "`server.cors_origins` of the fleet file",
                    "forbidden_origin",
                    "origin",
                )

    def _check_host(self, host: str, settings: ServerSettings) -> None:
        parts = _HOST.fullmatch(host.lower())
        if parts is None:
            why = f"Host {host[:_SHOWN]!r} is no host, or host:port"
            raise Fault(400, why, "invalid_request", "host")
        if settings.keys and not settings.hosts:
            return
        name = parts["name"].removesuffix(".")
        known = self._bound | {known.lower() for known in settings.hosts}
        if not (name in known or _is_loopback(name) or _is_address(name)):
            without = "" if settings.keys else " without keys"
            raise Fault(
                421,
                f"this server is not reached as {host[:_SHOWN]!r}{without}: use localhost or an IP "
                "address, or name the host in `server.hosts` of the fleet file",
                "unknown_host",
                "host",
            )


def check_origins(server: ServerSettings) -> None:
    """Raise ConfigError where pages of any origin could use a server that requires no keys."""
    if "*" in server.cors_origins and not server.keys:
        raise ConfigError(
            "server.cors_origins",
            "*",
            "no keys are configured, so every web page could use the server: name the origins, or "
            "set keys",
        )


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _is_loopback(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True


def _allowed(origin: str, settings: ServerSettings) -> bool:
    anyone = "*" in settings.cors_origins and bool(settings.keys)
    return anyone or origin.lower() in map(str.lower, settings.cors_origins)


def _same(origin: str, host: str | None) -> bool:
    """Whether an origin is that of the server itself, as the client reached it."""
    scheme, _, address = origin.lower().partition("://")
    default = _PORTS.get(scheme)
    if host is None or default is None:
        return False
    ours, theirs = _HOST.fullmatch(host.lower()), _HOST.fullmatch(address)
    if ours is None or theirs is None:
        return False
    return _address(ours, default) == _address(theirs, default)


def _address(parts: re.Match[str], default: str) -> tuple[str, str]:
    return parts["name"].removesuffix("."), parts["port"] or default
