"""Processes that hang, and are ended nonetheless."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ballast.server.http.watchdog import EXIT_CODE
from tests.server.process import DEADLINE

IMPORTS = """
import asyncio, re, threading, time
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
    assert run("time.sleep(0.3); re.match('(a+)+$', 'a' * 60 + 'b')").returncode == signal.SIGPROF


def test_a_loop_that_turns_is_left_alone() -> None:
    script = """
watchdog = Watchdog(hangs_seconds=5.0, tick_seconds=0.1)
watchdog.start()
async def main():
    for _ in range(80):
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
