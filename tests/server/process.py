"""A server in a process of its own, as an operator would run it, and clients for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import httpx
from openai import AsyncOpenAI, OpenAI

from ballast.bench.server_process import child_called, children_of
from ballast.cluster.worker.process_names import SERVING
from ballast.core.errors import Unavailable
from tests.server import served
from tests.server.held_worker import DEPARTS

DEADLINE = 240.0
"""Seconds after which a test gives up, on the slowest machine that may run it."""


def until(what: Callable[[], bool]) -> None:
    """Returns when `what` holds; fails after the deadline."""
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def error_line(stderr: str) -> str:
    """The last line of `stderr`. Before it are only lines of progress: how many depends on how
    slow the machine is, and "importing, 2 s" comes before there is a log."""
    *progress, line = stderr.splitlines()
    assert all(": starting " in p or re.fullmatch(r".+, \d+ s", p) for p in progress), stderr
    return line


class ServerProcess:
    """A running server, its output, and clients for it."""

    def __init__(self, fleet_file: Path, *options: str) -> None:
        self._held = served.held_file(fleet_file)
        self._process = subprocess.Popen(
            (sys.executable, served.__file__, str(fleet_file), *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._up.wait(DEADLINE)
        serving = [line for line in self.lines if line.startswith("ballast: serving ")]
        if not serving:
            self.close()
            raise RuntimeError("the server did not start:\n" + "".join(self.lines))
        self.url = serving[0].split(" at ")[1].strip()
        self.base = self.url.removesuffix("/v1")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith("ballast: serving "):
                self._up.set()
        self._up.set()

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(
            base_url=self.url,
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(timeout=DEADLINE),
        )

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=DEADLINE)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=DEADLINE)

    @property
    def children(self) -> list[int]:
        """Process ids: the worker, a spare, what renders templates, and what checks grammars."""
        return children_of(self._process.pid)

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self._process.pid

    @property
    def worker_pid(self) -> int:
        """Waits for one: another may have yet to take the place of one that died, and the kernel's
        list of children misses some where others end meanwhile."""
        found: list[int] = []

        def is_there() -> bool:
            with contextlib.suppress(Unavailable):
                found.append(child_called(SERVING, self._process.pid))
            return bool(found)

        until(is_there)
        return found[0]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def kill_worker(self) -> None:
        os.kill(self.worker_pid, signal.SIGKILL)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Meanwhile no request of a real model gets further than `held_worker.FAR`."""
        # Of the time before: a worker that was let go on may have made it after that.
        self._held.with_suffix(DEPARTS).unlink(missing_ok=True)
        self._held.touch()
        try:
            yield
        finally:
            self._held.unlink()

    def until_one_departs(self) -> None:
        """Returns when a device with a held job knows that a request leaves it for another."""
        until(self._held.with_suffix(DEPARTS).exists)

    def wait(self) -> int:
        """The exit code."""
        code = self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def close(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        for name in ("client", "http"):
            if name in self.__dict__:
                getattr(self, name).close()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def until_said(self, *texts: str) -> None:
        """Returns when all of `texts` are in the output: an answer may be here before a line that
        was written before it."""
        until(lambda: all(text in self.output for text in texts))


@contextmanager
def server(fleet_file: Path, *options: str) -> Iterator[ServerProcess]:
    """A server that is gone at the end, however the test ended."""
    running = ServerProcess(fleet_file, *options)
    try:
        yield running
    finally:
        running.close()
