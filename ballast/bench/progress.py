"""Show the progress of a command on stderr: bars on a terminal, plain lines elsewhere.

Without a terminal, a line about every `EVERY` seconds names the running part, and a part that
took longer than that is listed with its duration. Used by all commands that run for long.
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
together, the longest silence where a line is due even if nothing has changed."""
_BAR = 30
"""Cells: the rest of 80 is for words."""


class Progress(Protocol):
    """Callback that shows the progress of a task."""

    def __call__(self, what: str, done: int, total: int | None = None, note: str = "") -> None:
        """Report `done` of `total` parts of the task `what`, which begins with its first call;
        `total` None: unknown. May be called by any thread."""


def quiet(what: str, done: int, total: int | None = None, note: str = "") -> None:
    """Show no progress."""


def training(progress: Progress) -> Callable[[str, int, int, float], None]:
    """Show, by `progress`, how far `ballast.fleet.make` has trained each model."""

    def show(name: str, step: int, of: int, loss: float) -> None:
        progress(f"training {name}", step, of, f"loss {loss:.2f}")

    return show


@contextmanager
def shown(console: Console | None = None) -> Iterator[Progress]:
    """Show progress meanwhile, on stderr by default."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bars(console) as bars:
            yield bars
        return
    with lines_to(
        lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    ) as lines:
        yield lines.at


@contextmanager
def lines_to(write: Callable[[str], object], unchanged: float = EVERY) -> Iterator[Lines]:
    """Have a thread `write` lines of progress meanwhile, whenever one is due; `unchanged` as of
    `Lines`."""
    lines = Lines(write, unchanged=unchanged)

    def tick() -> None:
        while not lines.over.wait(TICK):
            lines.tick()

    ticking = threading.Thread(target=tick, name="progress", daemon=True)
    ticking.start()
    try:
        yield lines
    finally:
        lines.over.set()
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
    """Write plain lines of progress: the current task, at every `tick` that comes `EVERY` seconds
    after the line before; and each task that took longer than that, when it ends.

    `unchanged`: seconds after which a line that says nothing new is due."""

    def __init__(
        self,
        write: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
        unchanged: float = EVERY,
    ) -> None:
        self._write, self._now, self._unchanged = write, now, unchanged
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._line = self._written = ""
        self._what = ""
        self._written_at = now()
        self._finished = True
        self.over = threading.Event()
        """Set when nothing more is to be written."""

    def at(self, what: str, done: int, total: int | None = None, note: str = "") -> None:
        """Report progress; arguments as of `Progress`."""
        with self._lock:
            began = self._began.setdefault(what, self._now())
            count = counted(done, total, note)
            self._what, self._line = what, f"{what}: {count}" if count else what
            finished = total is not None and done >= total
            if finished and not self._finished and self._now() - began >= EVERY:
                self._write_line()
            self._finished = finished

    def tick(self) -> None:
        """Write a line if one is due."""
        with self._lock:
            settled = self._finished or self.over.is_set()
            wait = self._unchanged if self._line == self._written else EVERY
            if self._what and not settled and self._now() - self._written_at >= wait:
                self._write_line()

    def _write_line(self) -> None:
        self._written_at, self._written = self._now(), self._line
        self._write(f"{self._line}, {self._written_at - self._began[self._what]:.0f} s")


def counted(done: int, total: int | None, note: str) -> str:
    """``3 of 8, 1 failed``."""
    count = f"{done} of {total}" if total is not None else f"{done}" if done else ""
    return ", ".join(filter(None, (count, note)))
