"""Run `ballast top` and `ballast ps`: read the server's state, draw it or print it as JSON lines,
and handle keys.

The screen keeps the last reading, with its age, while the server cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from ballast.dashboard.reader import Rates, Reader, Unreadable
from ballast.dashboard.view import Frame, draw, listed
from ballast.server.observe.server_state import ServerNow


async def once(url: str, key: str | None, interval: float, console: Console) -> None:
    """Print one frame, from two readings, so that it has rates. Raises Unreadable."""
    rates = Rates()
    async with Reader(url, key) as reader:
        rates.add(await reader.read())
        await asyncio.sleep(interval)
        now = await reader.read()
    rates.add(now)
    console.print(draw(Frame(reader.url, now, rates), console.width, None))


async def listing(url: str, key: str | None, console: Console) -> None:
    """Print one reading of the server and its models. Raises Unreadable."""
    async with Reader(url, key) as reader:
        now = await reader.read()
    console.print(listed(now, reader.url, console.width))


async def lines(url: str, key: str | None, interval: float, *, forever: bool) -> None:
    """Print readings as lines of JSON on stdout. Raises Unreadable."""
    async with Reader(url, key) as reader:
        while True:
            sys.stdout.write((await reader.document()).decode() + "\n")
            sys.stdout.flush()
            if not forever:
                return
            await asyncio.sleep(interval)


async def live(url: str, key: str | None, interval: float, console: Console) -> None:
    """Run the screen until `q`, or a signal that ends it."""
    async with Reader(url, key) as reader:
        await Screen(reader, interval, console).run()


class Screen:
    """The screen of `ballast top`: reads the server periodically, and draws a frame at each
    change."""

    def __init__(self, reader: Reader, interval: float, console: Console) -> None:
        self._reader = reader
        self._interval = interval
        self._console = console
        self._rates = Rates()
        self._now: ServerNow | None = None
        self._read_at = 0.0
        self._trouble = "asking"
        self._pages = False
        self._over = False
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Draw a frame for each reading, key or change of the terminal's size."""
        loop = asyncio.get_running_loop()
        with (
            keys(self._pressed),
            Live(console=self._console, screen=True, auto_refresh=False) as shown,
        ):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._pressed, "q")
            loop.add_signal_handler(signal.SIGWINCH, self._news.set)
            reading = asyncio.create_task(self._read())
            try:
                while not self._over:
                    width, height = self._console.size
                    shown.update(draw(self._frame(), width, height), refresh=True)
                    await self._news.wait()
                    self._news.clear()
            finally:
                reading.cancel()

    def _frame(self) -> Frame:
        age = asyncio.get_running_loop().time() - self._read_at
        return Frame(self._reader.url, self._now, self._rates, self._trouble, age, self._pages)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                self._now = await self._reader.read()
                self._read_at = loop.time()
                self._rates.add(self._now)
                self._trouble = ""
            except Unreadable as error:
                self._trouble = f"{error}; trying again"
            self._news.set()
            due = max(loop.time(), due + self._interval)
            await asyncio.sleep(due - loop.time())

    def _pressed(self, key: str) -> None:
        self._over = self._over or key in ("q", "Q", "\x04")
        self._pages ^= key == "u"
        self._news.set()


@contextlib.contextmanager
def keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Call `pressed` for each key in the `with` block, where the input is a terminal; keys are not
    echoed."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 1024).decode(errors="replace")
        for key in typed or "q":  # nothing read: the terminal is gone
            pressed(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
