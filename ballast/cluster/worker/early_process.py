"""A worker's process that starts before its server knows what it is for, and imports meanwhile.

`ballast serve` starts it first of all. What PyTorch and the kernels take to import is most of a
start, and as much processor time goes into the server's own imports, up to where it can judge the
fleet file and start workers. The process gets the command line of a worker, and its descriptors,
once the server has them (`order`); it ends where it is not needed. Its other end is
`worker.process`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ballast.isolation.environment import child_environment

COMMAND = (sys.executable, "-m", "ballast.cluster.worker.process")
AHEAD = "--ahead"
"""First argument of such a process; the socket's descriptor and the parent's process id follow."""
MOST_BYTES, MOST_DESCRIPTORS = 1 << 16, 8
"""Bounds of the one message."""


class EarlyProcess:
    """Owns the process until it has its orders; then its worker does. Like a process of `asyncio`.

    The thread that makes it must live as long as the process, which ends with it.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """Start the process. Raises OSError."""
        # SEQPACKET keeps the bounds of the message: it is read whole.
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._taken = False
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                (*command, AHEAD, str(fd), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                env=child_environment({"RUST_BACKTRACE": "0"}),
            )

    def close(self) -> None:
        """End the process, unless it has become a worker."""
        self._orders.close()
        if not self._taken:
            self._taken = True
            self._process.kill()
            self._process.wait()

    def order(self, arguments: Sequence[str], fds: Mapping[str, int]) -> bool:
        """Make a worker of the process, by the `arguments` of one and the descriptors of further
        options. Returns whether it is one: it may have ended, or be one already."""
        if self._taken:
            return False
        message = json.dumps([list(arguments), list(fds)]).encode()
        try:
            socket.send_fds(self._orders, [message], list(fds.values()))
        except OSError:
            return False
        self._taken = True
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `wait` returned it; None before."""
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._process.wait()


def arguments_from(descriptor: int) -> list[str] | None:
    """Wait for the orders, in the process itself, and return the arguments of a worker; None: it is
    not needed."""
    with socket.socket(fileno=descriptor) as orders:
        message, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_DESCRIPTORS)
    if not message:
        return None
    arguments, options = json.loads(message)
    for option, fd in zip(options, fds, strict=True):
        arguments += (option, str(fd))
    return list(arguments)
