"""Connect a worker with the next server: word of a host's agent, lines of JSON in a pipe.

Written by `HostAgent`, read by `Worker`. The secret keys of a connection are in no argument and no
environment.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import msgspec

from ballast.transport.curve import CurveClient, CurveLink
from ballast.transport.sockets import Endpoint


class Renewal(msgspec.Struct, frozen=True):
    """Where the next server is; neither: the server is gone, and the worker waits for another."""

    keys: CurveLink | None = None
    directory: str = ""

    @property
    def place(self) -> Endpoint | Path | None:
        """Return what to connect to; None: there is no server now."""
        if self.keys is not None:
            return CurveClient(self.keys)
        return Path(self.directory) if self.directory else None


class RenewalPipe:
    """The agent's end."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        """`reader`: descriptor that the worker inherits."""
        os.set_blocking(self._writer, False)

    def write(self, renewal: Renewal) -> None:
        """Send word to the worker, which may have ended."""
        with contextlib.suppress(OSError):
            os.write(self._writer, msgspec.json.encode(renewal) + b"\n")

    def close_reader(self) -> None:
        """Close the end that the worker has inherited."""
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def close(self) -> None:
        self.close_reader()
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1


class Renewals:
    """The worker's end."""

    def __init__(self, fd: int) -> None:
        """Own `fd` from now on."""
        self.fd = fd
        os.set_blocking(fd, False)
        self._rest = b""
        self._latest: Renewal | None = None
        self.ended = False
        """Whether the agent has closed its end."""

    @property
    def waiting(self) -> bool:
        """Whether there is word that `take` has not returned."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fd, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                if lines:
                    self._latest = msgspec.json.decode(lines[-1], type=Renewal)
            self.ended = True
        return self._latest is not None

    def take(self, seconds: float, also: int) -> Renewal | None:
        """Return the latest word; None: there was none for `seconds`, or `also`, a descriptor,
        became readable."""
        if not self.waiting and not self.ended:
            poll = select.poll()
            for fd in (self.fd, also):
                poll.register(fd, select.POLLIN)
            poll.poll(seconds * 1e3)
        if not self.waiting:
            return None
        latest, self._latest = self._latest, None
        return latest
