"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE = 240.0
"""Seconds in which a page shows what it should, on the slowest machine that may run it."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
"""Path of the browser; None: there is none on this machine."""


class Browser:
    """One window with one page."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, os.fdopen(events, "rb", buffering=0)
        self._rest, self._n, self._session = b"", 0, ""
        self.complaints: list[str] = []
        """What the page's scripts raised, and what the browser refused it."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self._events.close()
        os.close(self._commands)

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of an expression, or of its promise."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Returns when an expression holds."""
        end = time.monotonic() + DEADLINE
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (expression, self.complaints)
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}[key]
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        if key in ("Enter", " "):
            event["text"] = "\r" if key == "Enter" else key
        self._call("Input.dispatchKeyEvent", type="keyDown", **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self) -> str:
        """A PNG in base64."""
        data: str = self._call("Page.captureScreenshot", format="png")["data"]
        return data

    def _call(self, method: str, **parameters: Any) -> Any:
        self._n += 1
        message: dict[str, Any] = {"id": self._n, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._n:
            self._notice(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._events.read(1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _notice(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["level"] == "error":
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are none of those that Chromium expects."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that is gone at the end, with a profile of its own."""
    assert CHROMIUM is not None
    (to_read, to_write), (from_read, from_write) = _high_pipe(), _high_pipe()
    # Chromium reads commands from descriptor 3 and writes to 4.
    command = (
        f'exec "$0" "$@" 3<&{to_read} 4>&{from_write} {to_read}<&- {from_write}>&-',
        CHROMIUM,
        *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
        *("--disable-dev-shm-usage", "--disable-extensions", "--no-first-run", "--no-proxy-server"),
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ("bash", "-c", *command, f"--user-data-dir={Path(profile) / 'profile'}", "about:blank"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, from_write),
        )
        os.close(to_read)
        os.close(from_write)
        try:
            made = Browser(to_write, from_read)
            try:
                yield made
            finally:
                made.close()
        finally:
            process.kill()
            process.wait()
