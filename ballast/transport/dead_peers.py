"""Have the kernel end a TCP connection whose peer has vanished without closing it."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

DEAD_SECONDS = 120
"""Seconds after which a peer that acknowledges nothing counts as gone."""


def notice_death(connection: Any) -> None:
    """Set the options on a socket, or on what stands for it on an event loop."""
    idle, between = DEAD_SECONDS // 2, DEAD_SECONDS // 8
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): idle,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): between,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): (DEAD_SECONDS - idle) // between,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): DEAD_SECONDS * 1000,
    }
    with contextlib.suppress(OSError):  # it may be gone already
        for (level, option), value in options.items():
            connection.setsockopt(level, option, value)
