"""Nothing runs for long in silence: bars on a terminal, lines elsewhere, of what and how far."""

from __future__ import annotations

import io

from rich.console import Console

from ballast.bench.progress import EVERY, TICK, Lines, shown


class Clocked:
    """Lines by a clock of the test's."""

    def __init__(self, unchanged: float = EVERY) -> None:
        self.written: list[str] = []
        self.now = 100.0
        self.lines = Lines(self.written.append, lambda: self.now, unchanged)

    def wait(self, seconds: float) -> list[str]:
        """What is written meanwhile."""
        before = len(self.written)
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            self.lines.tick()
        return self.written[before:]


def test_what_takes_long_is_said_again_and_again() -> None:
    clocked = Clocked()
    clocked.lines.at("static", 0, 8)
    assert clocked.wait(1.0) == []
    assert clocked.wait(0.5) == ["static: 0 of 8, 2 s"]
    clocked.lines.at("static", 3, 8, "1 failed")
    assert clocked.wait(3.0) == [
        "static: 3 of 8, 1 failed, 3 s",
        "static: 3 of 8, 1 failed, 4 s",
    ]
    assert len(clocked.wait(60.0)) == 60 / EVERY  # at least one in any two seconds
    assert EVERY + TICK <= 2.0


def test_what_has_not_changed_can_be_said_less_often() -> None:
    clocked = Clocked(unchanged=10.0)
    clocked.lines.at("loading", 0, 8)
    assert clocked.wait(11.0) == ["loading: 0 of 8, 2 s"]
    assert clocked.wait(0.5) == ["loading: 0 of 8, 12 s"]
    clocked.lines.at("loading", 1, 8)
    assert clocked.wait(3.0) == ["loading: 1 of 8, 13 s"]


def test_what_is_done_is_said_once_and_what_was_quick_is_not() -> None:
    clocked = Clocked()
    clocked.lines.at("importing", 0)
    clocked.wait(0.5)
    clocked.lines.at("loading", 0, 1)
    clocked.wait(0.5)
    clocked.lines.at("loading", 1, 1)
    assert clocked.written == []
    clocked.lines.at("swap", 0, 2)
    assert clocked.wait(1.5) == ["swap: 0 of 2, 0 s"]
    clocked.lines.at("swap", 2, 2)
    assert clocked.written[1:] == ["swap: 2 of 2, 2 s"]
    assert clocked.wait(10.0) == []
    clocked.lines.at("importing", 0)
    assert clocked.wait(0.5) == ["importing, 13 s"]


def test_what_is_over_is_not_said_again() -> None:
    clocked = Clocked()
    clocked.lines.at("starting", 0)
    assert clocked.wait(1.5) == ["starting, 2 s"]
    clocked.lines.over.set()
    assert clocked.wait(60.0) == []


def test_a_terminal_has_bars_which_name_what_runs() -> None:
    written = io.StringIO()
    with shown(Console(file=written, force_terminal=True, width=80)) as progress:
        progress("balloon", 3, 8, "1 failed")
    assert "balloon" in written.getvalue()
    assert "3 of 8, 1 failed" in written.getvalue()


def test_where_there_is_no_terminal_short_work_says_nothing() -> None:
    written = io.StringIO()
    with shown(Console(file=written)) as progress:
        progress("balloon", 8, 8)
    assert written.getvalue() == ""
