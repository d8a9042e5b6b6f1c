"""The flight recorder: whole or absent, and readable when its writer was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ballast.cluster.worker.flight_recorder import FlightRecorder, flight_memory


@pytest.fixture
def fd() -> Iterator[int]:
    made = flight_memory()
    yield made
    os.close(made)


def test_what_one_side_records_the_other_reads(fd: int) -> None:
    writer, reader = FlightRecorder(fd), FlightRecorder(fd)
    assert reader.read() == frozenset()
    writer.record(["cmpl-1-0", "cmpl-2-0"])
    assert reader.read() == {"cmpl-1-0", "cmpl-2-0"}
    writer.record(["short"])
    assert reader.read() == {"short"}
    writer.record(())
    assert reader.read() == frozenset()
    writer.close()
    reader.close()


def test_too_many_to_hold_are_not_recorded(fd: int) -> None:
    recorder = FlightRecorder(fd)
    recorder.record(["one"])
    recorder.record(f"request-{i}" for i in range(10_000))
    assert recorder.read() == frozenset()
    recorder.close()


KILLED = """
import os, signal, sys
from ballast.cluster.worker.flight_recorder import FlightRecorder
FlightRecorder(int(sys.argv[1])).record(["a", "b"])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_record_outlives_a_killed_writer(fd: int) -> None:
    ended = subprocess.run((sys.executable, "-c", KILLED, str(fd)), pass_fds=(fd,), check=False)
    assert ended.returncode == -9
    recorder = FlightRecorder(fd)
    assert recorder.read() == {"a", "b"}
    recorder.close()
