"""Read what ZeroMQ reports of a socket's connections: that the other end has come, or is gone.

Used by `transport.sockets` and `transport.curve`.
"""

from __future__ import annotations

import contextlib

import zmq
import zmq.utils.monitor

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ConnectionWatch:
    """Reads the events of a socket's connections, of which one is the other end's."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._events = socket.get_monitor_socket(zmq.EVENT_ALL)
        self._socket = socket
        self._open = set[int]()
        """Descriptors of connections that may be the other end's."""
        self._met = False
        """Whether the other end has connected: later connections are strangers'."""
        self.lost = False
        """Whether the connection has ended; what came on it has been received before."""

    @property
    def connected(self) -> bool:
        """Whether the other end has connected, and the connection has not ended."""
        return self._met and not self.lost

    def fileno(self) -> int:
        return fileno(self._events)

    def read(self, *, connects: bool) -> bool:
        """Return whether the connection has ended. `connects`: this end has made it."""
        with contextlib.suppress(zmq.Again):
            while True:
                got = zmq.utils.monitor.recv_monitor_message(self._events, zmq.DONTWAIT)
                self._note(got["event"], got["value"], connects)
        return self.lost

    def _note(self, event: int, fd: int, connects: bool) -> None:
        if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED) and not self._met:
            self._open.add(fd)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._met = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.discard(fd)
            self.lost |= self._met and not self._open
        elif connects and event & (_FAILED | zmq.EVENT_CLOSED):
            self.lost = True

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)


def fileno(socket: zmq.Socket[bytes]) -> int:
    """Return the descriptor that is readable when the socket may have changed."""
    fd = socket.getsockopt(zmq.FD)
    assert isinstance(fd, int)
    return fd
