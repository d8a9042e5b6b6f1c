"""Servers of rivals as child processes: start them, wait until they answer, stop them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from ballast.bench.server_process import children_of
from ballast.core.errors import Unavailable
from benchmarks.turns import users_environment

START_SECONDS = 600.0
STOP_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def server(
    command: Sequence[str], url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a server that answers `GET /health` at `url` once it serves; yields its process id.

    It has a session of its own, and all of that is stopped on leaving. Raises Unavailable, with the
    end of its log, if it does not start.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**users_environment(), **(environment or {})},
            start_new_session=True,
        )
    try:
        _await_health(process, url, log)
        yield process.pid
    finally:
        _stop(process)


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:]
    raise Unavailable(f"{process.args!r:.300} does not serve ({process.poll()}):\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sent, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with contextlib.suppress(ProcessLookupError):  # what the first process has left behind
        os.killpg(process.pid, signal.SIGKILL)


def family_of(pids: Sequence[int]) -> list[int]:
    """These processes and all that descend from them."""
    found = list(pids)
    for pid in found:
        with contextlib.suppress(OSError):
            found += children_of(pid)
    return found


def memory_of(pids: Sequence[int]) -> int:
    """Bytes of memory that these processes and their descendants have, shared pages divided among
    those that share them."""
    total = 0
    for pid in family_of(pids):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total
