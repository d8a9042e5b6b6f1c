"""Take from this process what reading untrusted data does not need.

A child that parses checkpoints, templates or grammars calls `confine` once it has loaded its
modules: from then on it starts no program, reaches no network, changes no file, and neither reads
nor signals other processes. A fault in a parser that lets an attacker run code gives them no more
than that.
"""

from __future__ import annotations

import ctypes
import os
import struct

from ballast.core.errors import DeviceError
from ballast.isolation import syscall_filter

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CAPABILITIES_VERSION = 0x2008_0522
_READING_CAPABILITIES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: a server that runs as root reads others' files."""
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
"""Flag of `landlock_create_ruleset`: return the kernel's version of Landlock."""
_CHANGES = 1 << 0 | 1 << 1 | sum(1 << bit for bit in range(4, 13))
"""Rights to files that the first version knows: execute, write, remove and make all kinds."""
_TCP, _TCP_SINCE = 0b11, 4
_OUTSIDE, _OUTSIDE_SINCE = 0b11, 6
"""Abstract sockets of processes outside, and signals to them."""


def confine() -> None:
    """Confine the calling thread, and those it starts, for good. What the kernel lacks is left out:
    see `missing`."""
    libc = _libc()
    _drop_capabilities(libc)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return
    _enter_landlock(libc)
    syscall_filter.deny_system_calls()


def confine_worker() -> None:
    """Deny this process, all its threads, what a worker without a GPU does not need, once it has
    started the processes that it needs. What the kernel lacks is left out."""
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        syscall_filter.deny_worker_calls()


def missing() -> list[str]:
    """Names of the kernel's means of confinement that are not to be had here."""
    found = [] if syscall_filter.is_available() else ["seccomp"]
    return found if _landlock_version(_libc()) > 0 else [*found, "Landlock"]


def conceal_memory() -> None:
    """Deny other processes of this user this process's memory and environment, in /proc and by
    tracing, and write no core dump. Root still has them, and so have processes that it forks.

    Raises DeviceError if the kernel refuses.
    """
    if _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise DeviceError("prctl(PR_SET_DUMPABLE)", os.strerror(ctypes.get_errno()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Keep the right to read files only: root without capabilities can trace no root with them."""
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    held = ctypes.create_string_buffer(24)  # effective, permitted, inheritable; twice 32 of them
    if libc.capget(header, held) == 0:
        effective, permitted, *_ = struct.unpack("6I", held.raw)
        kept = (effective & _READING_CAPABILITIES, permitted & _READING_CAPABILITIES)
        libc.capset(header, struct.pack("6I", *kept, 0, 0, 0, 0))


def _landlock_version(libc: ctypes.CDLL) -> int:
    """Version of the kernel's Landlock; below 1: it has none."""
    return int(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION))


def _enter_landlock(libc: ctypes.CDLL) -> None:
    """Enter a domain of its own that may change no file: Linux lets no process trace, or read by
    /proc, another one outside its domain."""
    version = _landlock_version(libc)
    if version < 1:
        return
    rules = [_CHANGES]
    if version >= _TCP_SINCE:
        rules.append(_TCP)
    if version >= _OUTSIDE_SINCE:
        rules.append(_OUTSIDE)
    packed = struct.pack(f"{len(rules)}Q", *rules)
    ruleset = libc.syscall(_LANDLOCK_CREATE, packed, ctypes.c_size_t(len(packed)), 0)
    if ruleset >= 0:
        libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
        os.close(ruleset)
