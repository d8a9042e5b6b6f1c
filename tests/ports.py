"""Ports that no other process gets while a test needs them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of this machine for servers that set SO_REUSEPORT, one after the other; nobody answers
    at it without one."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
