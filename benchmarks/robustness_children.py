"""What a child of a server could do once a hostile file has taken it over.

`python -m benchmarks.robustness_children KIND SERVER PORT` confines itself as children of that kind
are, tries it, and prints what succeeded. Each attack is (name, what is expected, what does it,
whether a witness must not notice).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ballast.bench.server_process import children_of
from ballast.isolation.confinement import confine, confine_worker
from benchmarks.robustness_target import MODEL, PATIENCE_SECONDS, SECRET, Target

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
KINDS = {"reader": (confine, tuple(ATTEMPTS)), "worker": (confine_worker, DENIED_TO_WORKERS)}


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


def taken_over(kind: str) -> Callable[[Target], str]:
    """Try all that in a process that is confined as the server's children of a kind are."""

    def run(target: Target) -> str:
        command = (sys.executable, "-m", __name__, kind, str(target.pid), str(target.port))
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stderr[-300:]
        assert not ended.stdout.strip(), f"it can {ended.stdout.strip()}"
        return f"{len(KINDS[kind][1])} x denied"

    return run


def taken_over_worker(target: Target) -> str:
    """Try it as a worker, and look whether all threads of the server's workers are confined."""
    seen = taken_over("worker")(target)
    workers = [pid for name, pid in target.processes.items() if name.startswith("ballast-worker")]
    threads = [task for pid in workers for task in Path(f"/proc/{pid}/task").iterdir()]
    confined = sum("\nSeccomp:\t2" in (task / "status").read_text() for task in threads)
    seen += f"; {confined} of {len(threads)} threads are confined"
    assert threads, seen
    assert confined == len(threads), seen
    return seen


def without_secrets(target: Target) -> str:
    """Look for the server's secrets in the environments of its children, once all kinds of them
    run, and for children that read what clients send and are not confined."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    status, answer = target.post("/v1/chat/completions", chat)
    assert status == 200, f"{status}: {answer}"
    status, answer = target.complete(structured_outputs={"regex": "[ab]+"}, max_tokens=2)
    assert status == 200, f"{status}: {answer}"
    seen, confined = 0, 0
    for pid in descendants(target.pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert SECRET.encode() not in environment, f"{_name(pid)} has the server's secrets"
            status_text = Path(f"/proc/{pid}/status").read_text()
            confined += "\nSeccomp:\t2" in status_text
            seen += 1
    assert confined >= 2, f"{confined} of {seen} children are confined"
    return f"{seen} children, none has them; {confined} confined"


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, and of theirs."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for child in children_of(pid):
            found += [child, *descendants(child)]
    return found


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


CHILD_ATTACKS: tuple[tuple[str, str, Callable[[Target], str], bool], ...] = (
    ("a child that is taken over", "denied", taken_over("reader"), True),
    ("a worker that is taken over", "denied", taken_over_worker, True),
    ("secrets of children", "none", without_secrets, True),
)


def main() -> None:
    confine_as, attempts = KINDS[sys.argv[1]]
    confine_as()
    print(", ".join(succeeding(int(sys.argv[2]), int(sys.argv[3]), attempts)))


if __name__ == "__main__":
    main()
