"""Deny a process the system calls that reading data does not need, by seccomp.

A list of denied calls, not of allowed ones: Python, the C library and native parsers change which
calls they use, and an allowed list would fail with their next release. Calls newer than this list
are denied as unknown (ENOSYS), upon which C libraries use older ones. Denied are other processes,
programs, the network, shared memory by name, namespaces and mounts, the kernel's own interfaces,
and everything that changes files (docs/decisions/068-children-are-confined.md).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterable, Iterator

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_ALL_THREADS, _ALLOW_SPECULATION = 1, 4
"""Flags of a filter. Without the second, kernels before 5.16 slow the process down."""
_KILL_PROCESS, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_DENY = _ERRNO | errno.EPERM
_NR_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
"""Instructions of classic BPF: load a word, compare it with a constant, return a constant."""

_LAST_KNOWN = 451
"""Newest system call that the lists consider (cachestat, Linux 6.5); numbers from 424 on are the
same on all machines."""
_MACHINES = {"x86_64": (0xC000_003E, 317, 0), "aarch64": (0xC000_00B7, 277, 1)}
"""Machine -> (AUDIT_ARCH, number of seccomp(2), column of the tables below)."""

_DENIED = {
    "other processes": """
        ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272
        pidfd_send_signal 424 424  pidfd_open 434 434  pidfd_getfd 438 438
        process_madvise 440 440  process_mrelease 448 448  move_pages 279 239
        migrate_pages 256 238  tkill 200 130  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240
        setpriority 141 140  sched_setscheduler 144 119  sched_setparam 142 118
        sched_setattr 314 274  ioprio_set 251 30
    """,
    "programs": "execve 59 221  execveat 322 281",
    "network": """
        socket 41 198  connect 42 203  bind 49 200  listen 50 201  accept 43 202  accept4 288 242
        io_uring_setup 425 425  io_uring_enter 426 426  io_uring_register 427 427
    """,
    "memory and queues by name": """
        shmget 29 194  msgget 68 186  semget 64 190  mq_open 240 180  mq_unlink 241 181
    """,
    "namespaces and mounts": """
        unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41
        chroot 161 51  open_tree 428 428  move_mount 429 429  fsopen 430 430  fsconfig 431 431
        fsmount 432 432  fspick 433 433  mount_setattr 442 442
        name_to_handle_at 303 264  open_by_handle_at 304 265
    """,
    "the kernel": """
        bpf 321 280  perf_event_open 298 241  userfaultfd 323 282  add_key 248 217
        request_key 249 218  keyctl 250 219  init_module 175 105  finit_module 313 273
        delete_module 176 106  kexec_load 246 104  kexec_file_load 320 294  reboot 169 142
        swapon 167 224  swapoff 168 225  acct 163 89  quotactl 179 60  quotactl_fd 443 443
        fanotify_init 300 262  personality 135 92  syslog 103 116
    """,
    "changes of files": """
        creat 85 -  truncate 76 45  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38
        renameat2 316 276  link 86 -  linkat 265 37  symlink 88 -  symlinkat 266 36  mkdir 83 -
        mkdirat 258 34  rmdir 84 -  mknod 133 -  mknodat 259 33  chmod 90 -  fchmod 91 52
        fchmodat 268 53  chown 92 -  fchown 93 55  lchown 94 -  fchownat 260 54  utime 132 -
        utimes 235 -  utimensat 280 88  futimesat 261 -  setxattr 188 5  lsetxattr 189 6
        fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
    """,
}
"""What is denied -> the calls, each with its numbers on x86_64 and aarch64."""
_DENIED_TO_WORKERS = (
    """
        ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272
        pidfd_send_signal 424 424  pidfd_open 434 434  pidfd_getfd 438 438
        process_madvise 440 440  process_mrelease 448 448
        io_uring_setup 425 425  io_uring_enter 426 426  io_uring_register 427 427
    """,
    _DENIED["programs"],
    _DENIED["namespaces and mounts"],
    _DENIED["the kernel"],
)
"""A worker writes caches, sets priorities of its threads, and talks to other processes by Unix
sockets."""
_SOCKET = "socket 41 198"
_UNKNOWN = "clone3 435 435  openat2 437 437"
"""Calls whose flags lie in memory, where a filter cannot read them; C libraries fall back on
`clone` and `openat`."""
_CLONE, _FORKS_APART = "clone 56 220", 0x7E02_0080
"""A fork into new namespaces: flags of `clone`."""
_OPENING = (("open 2 -", 1), ("openat 257 56", 2))
"""Calls that open files, and the argument that has their flags."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OWN_SIGNALS = "kill 62 129  tgkill 234 131  prlimit64 302 261"
_OWN = f"{_OWN_SIGNALS}  sched_setaffinity 203 122"
"""Calls that may name this process in their first argument, and no other one."""
_OWN_BY_ZERO = frozenset({"prlimit64", "sched_setaffinity"})
"""Those for which 0 is this process; for `kill` it is its group."""
_IOCTL, _TERMINAL_INPUT = "ioctl 16 29", (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into a terminal."""


def is_available() -> bool:
    """Return whether this kernel filters system calls, on a machine whose calls are listed."""
    if _machine() is None:
        return False
    action = ctypes.c_uint32(_ERRNO)
    return _seccomp(_GET_ACTION_AVAIL, ctypes.byref(action)) == 0


def deny_system_calls() -> bool:
    """Deny the calling thread, and those it starts, the listed calls for good: they fail with
    EPERM.

    It needs `no_new_privs`. Returns False where the kernel refuses.
    """
    return _install(_for_readers)


def deny_worker_calls() -> bool:
    """Deny all threads of this process what a worker without a GPU does not need: programs, sockets
    other than Unix ones, other processes, namespaces and mounts, the kernel's own interfaces.

    It needs `no_new_privs`. Returns False where the kernel refuses.
    """
    return _install(_for_workers, _ALL_THREADS | _ALLOW_SPECULATION)


def _install(rules: Callable[[int], Iterator[bytes]], flags: int = 0) -> bool:
    machine = _machine()
    if machine is None:
        return False
    architecture, _, column = machine
    program = b"".join(_program(architecture, column, rules(column)))
    code = ctypes.create_string_buffer(program, len(program))
    filter = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    return _seccomp(_SET_MODE_FILTER, filter, flags) == 0


def _machine() -> tuple[int, int, int] | None:
    return _MACHINES.get(platform.machine()) if ctypes.sizeof(ctypes.c_void_p) == 8 else None


def _seccomp(operation: int, argument: object, flags: int = 0) -> int:
    machine = _machine()
    assert machine is not None
    return int(ctypes.CDLL(None, use_errno=True).syscall(machine[1], operation, flags, argument))


def _program(architecture: int, column: int, rules: Iterator[bytes]) -> Iterator[bytes]:
    """Instructions of a filter; `rules` decide about calls that are known."""
    unknown = _ERRNO | errno.ENOSYS
    yield _op(_LOAD, _ARCHITECTURE_AT)
    yield from _unless(_EQUAL, architecture, _KILL_PROCESS)
    yield _op(_LOAD, _NR_AT)
    yield from _when(_GREATER, _LAST_KNOWN, unknown)  # x32's numbers too
    for number in _numbers(_UNKNOWN, column).values():
        yield from _when(_EQUAL, number, unknown)
    yield from rules
    yield _op(_RETURN, _ALLOW)


def _for_readers(column: int) -> Iterator[bytes]:
    yield from _deny(_DENIED.values(), column)
    for call, flags in _OPENING:
        yield from _by_argument(call, column, flags, [(_ANY_BIT, _WRITING, _DENY)])
    yield from _deny_others(_OWN, column)


def _for_workers(column: int) -> Iterator[bytes]:
    yield from _deny(_DENIED_TO_WORKERS, column)
    unix = [(_EQUAL, int(socket.AF_UNIX), _ALLOW)]
    yield from _by_argument(_SOCKET, column, 0, unix, _DENY)
    yield from _deny_others(_OWN_SIGNALS, column)


def _deny(groups: Iterable[str], column: int) -> Iterator[bytes]:
    """Deny calls, forks into new namespaces, and typing into a terminal."""
    for calls in groups:
        for number in _numbers(calls, column).values():
            yield from _when(_EQUAL, number, _DENY)
    yield from _by_argument(_CLONE, column, 0, [(_ANY_BIT, _FORKS_APART, _DENY)])
    typed = [(_EQUAL, request, _DENY) for request in _TERMINAL_INPUT]
    yield from _by_argument(_IOCTL, column, 1, typed)


def _deny_others(calls: str, column: int) -> Iterator[bytes]:
    """Deny calls that name another process than this one."""
    for name, number in _numbers(calls, column).items():
        own = (os.getpid(), 0) if name in _OWN_BY_ZERO else (os.getpid(),)
        allowed = [(_EQUAL, pid, _ALLOW) for pid in own]
        yield from _by_argument(f"{name} {number} {number}", column, 0, allowed, _DENY)


def _by_argument(
    call: str,
    column: int,
    argument: int,
    rules: list[tuple[int, int, int]],
    otherwise: int = _ALLOW,
) -> Iterator[bytes]:
    """Decide about one call by the low word of an argument."""
    body = [_op(_LOAD, _ARGUMENTS_AT + 8 * argument)]
    for rule in rules:
        body += _when(*rule)
    body.append(_op(_RETURN, otherwise))
    for number in _numbers(call, column).values():
        yield _op(_EQUAL, number, 0, len(body))
        yield from body


def _when(compare: int, value: int, action: int) -> Iterator[bytes]:
    yield _op(compare, value, 0, 1)
    yield _op(_RETURN, action)


def _unless(compare: int, value: int, action: int) -> Iterator[bytes]:
    yield _op(compare, value, 1, 0)
    yield _op(_RETURN, action)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """`struct sock_filter`; the jumps are relative."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def _numbers(calls: str, column: int) -> dict[str, int]:
    """Calls by name, without those that the machine has not."""
    words = calls.split()
    rows = zip(words[::3], zip(words[1::3], words[2::3], strict=True), strict=True)
    return {name: int(row[column]) for name, row in rows if row[column] != "-"}
