"""A bar for each stage of a command that takes minutes, and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[str | None], None]
"""One step is done; a text replaces what stands beside the stage's name."""


class Stages:
    """A context in which bars are drawn twice a second, whether a stage advances or not."""

    def __init__(self, console: Console) -> None:
        self.seconds: dict[str, float] = {}
        """By stage that has ended, in order."""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=2,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @contextmanager
    def stage(self, name: str, steps: int | None = None) -> Iterator[Advance]:
        """A stage of so many steps; None: their number is not known."""
        task = self._bar.add_task(name, total=steps, note="")
        began = time.monotonic()

        def advance(note: str | None = None) -> None:
            if note is None:
                self._bar.advance(task)
            else:
                self._bar.update(task, advance=1, note=note)

        yield advance
        self.seconds[name] = time.monotonic() - began
        done = 1 if steps is None else steps
        self._bar.update(task, total=done, completed=done, note="")
        self._bar.stop_task(task)
