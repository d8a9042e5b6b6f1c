"""Network namespaces of this machine, as hosts with a link each that can be cut and slowed.

::

    host0 ── veth ──┐
    host1 ── veth ──┼── bridge, in a namespace of its own
    host2 ── veth ──┘

Processes that a thread starts are in its namespace. They share everything else of the machine.
Needs root, `ip` and `tc`; a link is slowed by a token bucket, as `netem` is not in every kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

CLONE_NEWNET = 0x4000_0000
SUBNET = "10.77.0"
LINK = "eth0"
SLOW = ("rate", "20mbit", "burst", "32kbit", "latency", "400ms")


def available() -> bool:
    """Whether this process may make namespaces and join them."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    probe = f"ballast-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class HostNetwork:
    """A namespace for each host, all joined by a bridge."""

    def __init__(self, names: Sequence[str]) -> None:
        """Make the namespaces; the calling thread is in the first one from now on, until `close`.
        Raises CalledProcessError."""
        self._spaces = {name: f"ballast-{os.getpid()}-{name}" for name in names}
        self._bridge = f"ballast-{os.getpid()}-bridge"
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
            for name in names:
                self._join(name)
            self._enter(names[0])
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        """Return a host's address."""
        return f"{SUBNET}.{list(self._spaces).index(name) + 1}"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Have this thread, and what it starts, on a host; on the first one afterwards."""
        self._enter(name)
        try:
            yield
        finally:
            self._enter(next(iter(self._spaces)))

    def cut(self, name: str) -> None:
        """Cut a host's link: what is sent is lost."""
        _run("ip", "-n", self._spaces[name], "link", "set", LINK, "down")

    def slow(self, name: str) -> None:
        """Slow a host's link in both directions."""
        _run("tc", "-n", self._spaces[name], "qdisc", "add", "dev", LINK, "root", "tbf", *SLOW)
        _run("tc", "-n", self._bridge, "qdisc", "add", "dev", name, "root", "tbf", *SLOW)

    def mend(self, name: str) -> None:
        """Undo `cut`, or `slow`."""
        _run("ip", "-n", self._spaces[name], "link", "set", LINK, "up")
        for space, link in ((self._spaces[name], LINK), (self._bridge, name)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not slowed
                _run("tc", "-n", space, "qdisc", "del", "dev", link, "root")

    def close(self) -> None:
        """Leave and remove the namespaces, whose processes have ended."""
        _set_namespace(self._home)
        os.close(self._home)
        for space in (*self._spaces.values(), self._bridge):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", space)

    def _join(self, name: str) -> None:
        space = self._spaces[name]
        _run("ip", "netns", "add", space)
        peer = ("type", "veth", "peer", "name", LINK, "netns", space)
        _run("ip", "-n", self._bridge, "link", "add", name, *peer)
        _run("ip", "-n", self._bridge, "link", "set", name, "master", "bridge", "up")
        _run("ip", "-n", space, "address", "add", f"{self.address(name)}/24", "dev", LINK)
        for link in ("lo", LINK):
            _run("ip", "-n", space, "link", "set", link, "up")

    def _enter(self, name: str) -> None:
        space = os.open(Path("/run/netns") / self._spaces[name], os.O_RDONLY)
        try:
            _set_namespace(space)
        finally:
            os.close(space)


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
