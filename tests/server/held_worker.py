"""A worker of real models that holds its jobs while a file is there, once one of their requests has
come far: what a test does in the midst of an answer happens there, however fast the machine is.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ballast.cluster.worker.process import live_device, main
from ballast.core.event import JobResult
from ballast.core.job import SequenceWork
from ballast.transport import page_descriptors

FILE = "BALLAST_TEST_HELD"
"""Variable of the environment: the file's path."""
DEPARTS = ".departs"
"""Suffix of another file, made while jobs are held by a worker that a request is to depart from."""
FAR = 40
"""Position from which on a request is held."""

Run = Callable[[Sequence[SequenceWork]], list[JobResult]]


def held(run: Run, file: Path, device: Any) -> Run:
    def wait_and_run(work: Sequence[SequenceWork]) -> list[JobResult]:
        while file.exists() and any(w.end > FAR for w in work):
            time.sleep(0.002)
            if device.state.migration.departing:
                file.with_suffix(DEPARTS).touch()
        return run(work)

    return wait_and_run


def held_device(*given: Any, kv_fd: int | None = None) -> Any:
    """As `live_device`. Models that join later are held as well."""
    device: Any = live_device(*given, kv_fd=kv_fd)
    file = Path(os.environ[FILE])
    make = device.executors_of

    def held_executors(*of: Any) -> Any:
        executors = make(*of)
        hold(executors, file, device)
        return executors

    device.executors_of = held_executors
    for executors in device.executors.values():
        hold(executors, file, device)
    return device


def hold(executors: Iterable[Any], file: Path, device: Any) -> None:
    """Have executors, of which lanes may share some, hold their jobs while `file` is there."""
    for executor in {id(e): e for e in executors}.values():
        executor.run = held(executor.run, file, device)


if __name__ == "__main__":
    page_descriptors.PATIENCE_SECONDS = 240.0  # for another worker that had no time to answer
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kv", type=int)
    main(make_device=partial(held_device, kv_fd=parser.parse_known_args()[0].kv))
