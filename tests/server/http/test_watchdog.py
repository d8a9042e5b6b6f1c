"""Processes that hang, and are ended nonetheless."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ballast.server.http.watchdog import EXIT_CODE, LEAST_SHARE, counted_part
from tests.server.process import DEADLINE

IMPORTS = """
import asyncio, re, signal, threading, time
from ballast.server.http.watchdog import Watchdog
"""
START = """
watchdog = Watchdog(hangs_seconds=1.0, tick_seconds=0.1)
watchdog.start()
"""
HANGS = {
    "a loop in Python": "while True: pass",
    "a lock that nobody gives back": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


def run(script: str, start: str = START) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-c", IMPORTS + start + script),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_a_loop_that_hangs_is_ended_with_its_stack(hang: str) -> None:
    ended = run(hang)
    assert ended.returncode == EXIT_CODE
    assert "event loop has not turned" in ended.stderr
    assert '"<string>", line 7 in <module>' in ended.stderr


def test_who_keeps_the_interpreter_lock_is_ended_too() -> None:
    script = """
while signal.getitimer(signal.ITIMER_PROF)[0] == 0.0: time.sleep(0.01)
re.match('(a+)+$', 'a' * 60 + 'b')
"""
    assert run(script).returncode == signal.SIGPROF


def test_ticks_that_others_had_on_a_busy_machine_do_not_count() -> None:
    """At a load of ten the loop has a tenth of the time; a loop that waits for something hangs."""
    assert counted_part(0.1) == 0.1
    assert counted_part(LEAST_SHARE) == LEAST_SHARE, "so that any hang ends some time"
    assert counted_part(0.0) == counted_part(LEAST_SHARE / 2) == 1.0
    assert counted_part(1.0) == counted_part(1.3) == 1.0, "a late tick counts as one"


def test_a_loop_that_turns_is_left_alone() -> None:
    script = """
watchdog = Watchdog(hangs_seconds=5.0, tick_seconds=0.1)
watchdog.start()
async def main():
    for _ in range(55):
        watchdog.beat()
        await asyncio.sleep(0.1)
asyncio.run(main())
watchdog.stop()
"""
    assert run(script, start="").returncode == 0


def test_a_thread_that_does_not_end_does_not_keep_the_process() -> None:
    script = """
forever = threading.Event()
threading.Thread(target=forever.wait).start()
watchdog.end_within(0.5)
watchdog.beat()
"""
    ended = run(script)
    assert ended.returncode == EXIT_CODE
    assert "it was to stop" in ended.stderr
