"""How far a command is, on stderr: bars on a terminal, plain lines elsewhere.

Whatever a command does for longer than `EVERY` seconds is named, with how long it has taken: a
silent program looks like one that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

EVERY, TICK = 1.5, 0.5
"""Seconds between two lines where there is no terminal, and between two looks whether one is due:
together, the longest silence."""
_BAR = 30
"""Cells: the rest of 80 is for words."""


class Progress(Protocol):
    """Takes note of how far something is."""

    def __call__(self, what: str, done: int, total: int | None = None, note: str = "") -> object:
        """`done` parts of `total` of `what`, which begins with its first call; `total` None: nobody
        knows how many there are. From any thread."""


def quiet(what: str, done: int, total: int | None = None, note: str = "") -> None:
    """Progress that is shown to nobody."""


@contextmanager
def shown(console: Console | None = None) -> Iterator[Progress]:
    """Show progress meanwhile, on stderr unless told otherwise."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bars(console) as bars:
            yield bars
        return
    lines = Lines(lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK):
            lines.tick()

    ticking = threading.Thread(target=tick, name="progress", daemon=True)
    ticking.start()
    try:
        yield lines.at
    finally:
        over.set()
        ticking.join()


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(_BAR),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with RichProgress(*columns, console=console, transient=True) as bars:

        def at(what: str, done: int, total: int | None = None, note: str = "") -> None:
            count = counted(done, total, note)
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, count=count)
            bars.update(tasks[what], completed=done, total=total, count=count)

        yield at


class Lines:
    """Plain lines: what is going on, at every `tick` at which it has not just been said; and what
    took longer than that, when it is done."""

    def __init__(
        self, write: Callable[[str], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._now = write, now
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._line = ""
        self._what = ""
        self._said = now()
        self._over = True

    def at(self, what: str, done: int, total: int | None = None, note: str = "") -> None:
        """As of `Progress`."""
        with self._lock:
            began = self._began.setdefault(what, self._now())
            count = counted(done, total, note)
            self._what, self._line = what, f"{what}: {count}" if count else what
            finished = total is not None and done >= total
            if finished and not self._over and self._now() - began >= EVERY:
                self._say()
            self._over = finished

    def tick(self) -> None:
        """Some time has passed."""
        with self._lock:
            if self._what and not self._over and self._now() - self._said >= EVERY:
                self._say()

    def _say(self) -> None:
        self._said = self._now()
        self._write(f"{self._line}, {self._said - self._began[self._what]:.0f} s")


def counted(done: int, total: int | None, note: str) -> str:
    """``3 of 8, 1 failed``."""
    count = f"{done} of {total}" if total is not None else f"{done}" if done else ""
    return ", ".join(filter(None, (count, note)))
