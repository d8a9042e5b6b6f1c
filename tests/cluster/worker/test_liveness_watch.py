"""When a worker that does not send counts as dead. Ticks and readings are the tests' own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from pathlib import Path

import pytest

from ballast.cluster.worker.liveness_watch import Activity, LivenessWatch, process_activity
from ballast.core.settings import ServerSettings
from tests.server.process import until

LIMITS = ServerSettings(
    silent_seconds=20.0, starting_seconds=120.0, stuck_seconds=300.0, loading_seconds=600.0
)


def watch(activity: Callable[[], Activity | None], *, serves: bool) -> LivenessWatch:
    watched = LivenessWatch(lambda why: None, activity)
    watched.limits = LIMITS
    if serves:
        watched.note_ready()
    return watched


def lives(readings: Iterator[Activity | None], *, serves: bool) -> tuple[int, str]:
    """Seconds of silence after which it is killed, and why."""
    watched = watch(readings.__next__, serves=serves)
    for second in range(1, 10_000):
        if why := watched.tick(1.0):
            return second, why
    raise AssertionError("it is never killed")


def with_the_last_for_ever(*readings: Activity | None) -> Iterator[Activity | None]:
    return chain(readings, repeat(readings[-1]))


@pytest.mark.parametrize(("serves", "seconds"), [(True, 21), (False, 121)])
@pytest.mark.parametrize("reading", [(7, 0), None], ids=["idle", "unreadable"])
def test_what_neither_sends_nor_computes_is_killed(
    reading: Activity | None, serves: bool, seconds: int
) -> None:
    after, why = lives(with_the_last_for_ever(reading), serves=serves)
    assert seconds <= after <= seconds + 1  # the first reading may show activity before it
    assert f"for {seconds - 1} s, and used no processor time" in why


@pytest.mark.parametrize(("serves", "seconds"), [(True, 301), (False, 601)])
@pytest.mark.parametrize("step", [(1, 0), (0, 1)], ids=["processor time", "page faults"])
def test_what_computes_has_longer_but_not_for_ever(
    step: Activity, serves: bool, seconds: int
) -> None:
    after, why = lives(((n * step[0], n * step[1]) for n in count()), serves=serves)
    assert after == seconds
    assert f"for {seconds - 1} s, though it used processor time" in why


def test_the_little_that_a_busy_machine_leaves_is_enough() -> None:
    """A hundredth of a second in every fifteen."""
    watched = watch(((n // 15, 0) for n in count()).__next__, serves=True)
    assert not any(watched.tick(1.0) for _ in range(300))


def test_computing_that_ends_in_a_hang_is_killed_soon_after() -> None:
    computed: list[Activity | None] = [(n, 0) for n in range(100)]
    after, _ = lives(with_the_last_for_ever(*computed), serves=True)
    assert after == 100 + 20


def test_a_message_counts_as_life() -> None:
    watched = watch(lambda: (7, 0), serves=True)
    for _ in range(30):
        assert not any(watched.tick(1.0) for _ in range(15))
        watched.note_message()


def test_limits_of_silence_are_kept_where_they_are_longer_than_those_of_work() -> None:
    watched = LivenessWatch(lambda why: None, ((n, 0) for n in count()).__next__)
    watched.limits = ServerSettings(silent_seconds=50.0, stuck_seconds=2.0)
    watched.note_ready()
    assert not any(watched.tick(1.0) for _ in range(50))
    assert watched.tick(1.0) is not None


def test_activity_of_a_process_is_that_of_all_its_threads() -> None:
    script = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin).start()
"""
    with subprocess.Popen((sys.executable, "-c", script)) as busy:
        try:
            before = process_activity(busy.pid)
            assert before is not None
            until(lambda: (process_activity(busy.pid) or before)[0] > before[0] + 20)
        finally:
            busy.kill()
    assert process_activity(busy.pid) is None


def test_activity_of_a_process_with_an_odd_name_is_read() -> None:
    script = "import pathlib, sys; pathlib.Path('/proc/self/comm').write_text('a) R (b'); input()"
    with subprocess.Popen((sys.executable, "-c", script), stdin=subprocess.PIPE) as odd:
        try:
            until(lambda: ") R (" in Path(f"/proc/{odd.pid}/stat").read_text())
            assert process_activity(odd.pid) is not None
        finally:
            odd.kill()
