"""Start `ballast serve` as a child process, for the demo and for benchmarks."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ballast.cluster.worker.process_names import SERVING
from ballast.core.errors import Unavailable

CLOSING = 10.0
"""Seconds to wait for a server's standard output to end, once the server has."""
ENDED = FileNotFoundError, ProcessLookupError
"""Raised by reading files in /proc of a thread or process that has just ended."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answers requests."""

    url: str
    """Without `/v1`."""
    pid: int

    @property
    def worker(self) -> int:
        """Process id."""
        return child_called(SERVING, self.pid)


def children_of(server: int) -> list[int]:
    """Process ids."""
    found: list[int] = []
    for task in Path(f"/proc/{server}/task").glob("*/children"):
        with contextlib.suppress(*ENDED):
            found += map(int, task.read_text().split())
    return found


def child_called(name: str, server: int) -> int:
    """Process id of a server's child. Raises Unavailable if there is none of that name now."""
    for child in children_of(server):
        with contextlib.suppress(*ENDED):
            if Path(f"/proc/{child}/comm").read_text().strip() == name:
                return child
    raise Unavailable(f"the server has no {name} now")


@contextlib.contextmanager
def serving(
    file: Path,
    *options: str,
    command: Sequence[str] = (sys.executable, "-m", "ballast.cli"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Serving]:
    """Serve `file` on a free port; drained on leaving. Raises Unavailable if it does not start.

    `options` are the command line's; `environment` replaces this process's.
    """
    arguments = [*command, "serve", str(file), "--port", "0", *options]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    output = process.stdout
    # A server whose standard output is full stands still.
    reader = threading.Thread(target=_read_to_end, args=(output,), daemon=True)
    try:
        found = next((f for line in output if (f := re.search(r"(http://\S+)/v1", line))), None)
        if found is None:
            raise Unavailable(f"the server ended with code {process.wait()} before it was ready")
        reader.start()
        yield Serving(found[1], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        if reader.ident is None:
            output.close()
        else:
            reader.join(CLOSING)


def _read_to_end(output: IO[str]) -> None:
    with output:
        for _ in output:
            pass
