"""What a child of a server could do once a hostile file has taken it over."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

ATTEMPTS: dict[str, Callable[[int, int], object]] = {
    "read its environment": lambda pid, _: Path(f"/proc/{pid}/environ").read_bytes(),
    "open its memory": lambda pid, _: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
    "open its files": lambda pid, _: os.close(os.open(f"/proc/{pid}/fd/0", os.O_RDONLY)),
    "list its mappings": lambda pid, _: Path(f"/proc/{pid}/maps").read_bytes(),
    "trace it": lambda pid, _: _called(ctypes.CDLL(None, use_errno=True).ptrace(16, pid, 0, 0)),
    "signal it": lambda pid, _: os.kill(pid, 0),
    "signal it by a descriptor": lambda pid, _: _signalled(pid),
    "signal its group": lambda pid, _: os.killpg(os.getpgid(pid), 0),
    "limit it": lambda pid, _: resource.prlimit(pid, resource.RLIMIT_CORE),
    "connect to it": lambda _, port: _connect(port),
    "send a datagram": lambda _, port: socket.socket(type=socket.SOCK_DGRAM).close(),
    "use IPv6": lambda _, port: socket.socket(socket.AF_INET6).close(),
    "use a Unix socket": lambda _, port: socket.socket(socket.AF_UNIX).close(),
    "use netlink": lambda _, port: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
    "start a program": lambda *_: subprocess.run(["/bin/true"], check=True),
    "write a file": lambda *_: Path("robustness-was-here").write_text("x"),
    "make a directory": lambda *_: Path("robustness-was-here").mkdir(),
    "remove a file": lambda *_: Path("robustness-is-not-here").unlink(),
    "change a file's mode": lambda *_: Path("robustness-is-not-here").chmod(0o777),
    "enter new namespaces": lambda *_: _called(ctypes.CDLL(None).unshare(0x1000_0000)),
}
"""What is tried with the server's process id and port; it succeeds, or raises OSError."""


DENIED_TO_WORKERS = (
    "trace it",
    "signal it",
    "signal it by a descriptor",
    "signal its group",
    "limit it",
    "connect to it",
    "send a datagram",
    "use IPv6",
    "use netlink",
    "start a program",
    "enter new namespaces",
)
"""What a worker cannot do; it writes caches and uses Unix sockets. That it cannot read the server's
memory is the server's doing."""


def succeeding(pid: int, port: int, attempts: Iterable[str] = ATTEMPTS) -> list[str]:
    """Names of the attempts that a confinement does not prevent, made by this process."""
    found = []
    for name in attempts:
        try:
            ATTEMPTS[name](pid, port)
        except PermissionError:
            continue
        except OSError:  # it was tried, and failed for want of a file, or of a listener
            pass
        found.append(name)
    return found


def _called(result: int) -> None:
    if result != 0:
        raise PermissionError


def _connect(port: int) -> None:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", port))


def _signalled(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, 0)
    finally:
        os.close(descriptor)
