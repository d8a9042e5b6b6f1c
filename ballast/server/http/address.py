"""Bind the server's listening socket, and determine whether other machines can reach its
address."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from ballast.core.errors import ConfigError
from ballast.core.settings import ServerSettings


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a bound socket; it is bound before anything slow begins, and refuses connections until
    it listens.

    Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            "host", host, f"it must be an address of this machine ({error})"
        ) from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            allowed = f"it must be free and allowed on {host} ({error.strerror})"
            raise ConfigError("port", port, allowed) from None
        yield listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, in all addresses that it resolves to."""
    try:
        found = {str(a[4][0]) for a in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # binding it will raise the error
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in found)


def check_closed(host: str, server: ServerSettings, hosts_http: int | None = None) -> None:
    """Raise ConfigError where other machines could reach a server that requires no keys.
    `hosts_http`: port at which hosts of a cluster are to answer for it."""
    if not server.keys and hosts_http is not None:
        raise ConfigError(
            "hosts.http",
            hosts_http,
            "others reach these hosts, and no keys are configured: set BALLAST_API_KEY or "
            "`server.keys` in the fleet file, or let everybody in with --without-keys",
        )
    if not server.keys and not is_loopback(host):
        raise ConfigError(
            "--host",
            host,
            "others than this machine reach it, and no keys are configured: set BALLAST_API_KEY "
            "or `server.keys` in the fleet file, or let everybody in with --without-keys",
        )
