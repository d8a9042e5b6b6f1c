"""A server in a process of its own, as an operator would run it. Run as a script, it is one."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import httpx
from openai import AsyncOpenAI, OpenAI

from ballast.bench.server_process import child_called, children_of
from ballast.cluster.worker.process_names import SERVING

DEADLINE = 240.0
"""Seconds after which a test gives up, on the slowest machine that may run it."""


HELD_WORKER = "held_worker.py"


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
        self._held = held_file(fleet_file)
        self._process = subprocess.Popen(
            (sys.executable, __file__, str(fleet_file), *options),
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
        return child_called(SERVING, self._process.pid)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def kill_worker(self) -> None:
        os.kill(self.worker_pid, signal.SIGKILL)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Meanwhile no request of a real model gets further than `held_worker.FAR`."""
        self._held.touch()
        try:
            yield
        finally:
            self._held.unlink()

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


def held_file(fleet_file: Path) -> Path:
    """While it is there, workers of real models hold their jobs."""
    return fleet_file.with_suffix(".held")


@contextmanager
def server(fleet_file: Path, *options: str) -> Iterator[ServerProcess]:
    """A server that is gone at the end, however the test ended."""
    running = ServerProcess(fleet_file, *options)
    try:
        yield running
    finally:
        running.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("fleet", type=Path)
    parser.add_argument("--echo", action="store_true", help="a device that repeats the prompt")
    parser.add_argument("--h11", action="store_true", help="as where httptools is missing")
    parser.add_argument("--spare", action="store_true", help="a spare worker, as by default")
    parser.add_argument("--ping", type=float, help="seconds of silence before a ping")
    parser.add_argument("--drain", type=float, default=30.0)
    parser.add_argument("--changes", type=Path, help="where they are kept")
    arguments = parser.parse_args()
    if arguments.h11:
        sys.modules["uvicorn.protocols.http.httptools_impl"] = None  # type: ignore[assignment]
    logging.basicConfig(level=logging.WARNING)

    from ballast.core.settings import FleetSettings
    from ballast.fleet.fleet_source import FleetSource
    from ballast.policy.presets import PRESETS
    from ballast.server.serve import serve

    def adjust(fleet: FleetSettings) -> FleetSettings:
        settings = replace(
            fleet.server, drain_seconds=arguments.drain, spare_worker=arguments.spare
        )  # most tests need no spare, and its libraries cost processor time
        if arguments.ping is not None:
            settings = replace(settings, ping_seconds=arguments.ping)
        return replace(fleet, server=settings)

    here = Path(__file__).parent
    worker = here.parent / "cluster" / "fake_device.py" if arguments.echo else here / HELD_WORKER
    os.environ["BALLAST_TEST_HELD"] = str(held_file(arguments.fleet))
    return serve(
        FleetSource(arguments.fleet, presets=PRESETS, changes=arguments.changes, adjust=adjust),
        port=0,
        worker_command=(sys.executable, str(worker)),
        own_process=True,
    )


if __name__ == "__main__":
    sys.exit(main())
