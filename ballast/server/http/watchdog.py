"""End a server process whose event loop hangs, or that does not stop in time when it should.

A thread counts ticks since the loop last turned. A tick in which the loop's thread computed counts
for the processor time that it had: the rest of it went to others on a busy machine. Code that keeps
the interpreter lock stops that thread too: then the kernel's CPU-time timer (SIGPROF), which the
thread resets at every tick, ends the process. Ticks are counted, not clock time, so that a process
that was stopped, or a machine that slept, does not count as hung. Used by `serve`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

HANGS_SECONDS = 30.0
"""Seconds after which an event loop that has not turned counts as hung."""
LAST_WORDS_SECONDS = 1.0
"""Most seconds spent on writing the stacks of all threads: the reader of stderr may be gone."""
LEAST_SHARE = 0.02
"""Part of a tick below which the loop's thread counts as waiting: the tick counts in full."""
EXIT_CODE = 1
"""Exit code of a process that the watchdog ends; where the interpreter lock is held, the code is
SIGPROF's number."""


class Watchdog:
    """Watches one event loop, from `start` to the end of the process or to `stop`."""

    def __init__(self, hangs_seconds: float = HANGS_SECONDS, tick_seconds: float = 1.0) -> None:
        self._most_ticks = hangs_seconds / tick_seconds
        self._tick_seconds = tick_seconds
        # While a tick is late, all cores may be busy with work that does not need the lock.
        self._cpu_seconds = hangs_seconds + 2 * tick_seconds * (os.cpu_count() or 1)
        self._ticks = 0.0
        """Ticks since the loop last turned."""
        self._loop_seconds: Callable[[], float] = time.thread_time
        self._ticks_left: float | None = None
        """Ticks until the process must have ended; None: no such time is set."""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch. Call it in the main thread."""
        _exit_at(signal.SIGPROF)
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._loop_seconds = lambda: time.clock_gettime(clock)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Record that the loop turns."""
        self._ticks = 0.0

    def end_within(self, seconds: float) -> None:
        """End the process if it has not ended by itself within `seconds`."""
        self._ticks_left = seconds / self._tick_seconds

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        before = self._loop_seconds()
        while not self._stopped.wait(self._tick_seconds):
            signal.setitimer(signal.ITIMER_PROF, self._cpu_seconds)
            now = self._loop_seconds()
            self._ticks += counted_part((now - before) / self._tick_seconds)
            before = now
            if self._ticks > self._most_ticks:
                _end(f"its event loop has not turned for {self._ticks * self._tick_seconds:.3g} s")
            if self._ticks_left is not None:
                self._ticks_left -= 1
                if self._ticks_left <= 0:
                    _end("it was to stop and does not")
        signal.setitimer(signal.ITIMER_PROF, 0)


def counted_part(share: float) -> float:
    """Return the part of a tick that counts, if the loop's thread computed for `share` of it."""
    return min(1.0, share) if share >= LEAST_SHARE else 1.0


def _end(why: str) -> None:
    """Write the reason and the stacks of all threads to stderr, and exit."""

    def write() -> None:
        print(f"ballast: the server is ended: {why}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)

    words = threading.Thread(target=write, daemon=True)
    words.start()
    words.join(LAST_WORDS_SECONDS)
    os._exit(EXIT_CODE)


def _exit_at(number: int) -> None:
    """Have a signal end the process at once, even while the interpreter lock is held, and even
    if it is the first process of a container, which the kernel exempts from a signal's default
    action."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
