"""Logs of every process in one form, written by a thread: a full pipe or disk stops nobody."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

from ballast.core.errors import ConfigError

FORMATS = ("text", "json")
FORMAT_VARIABLE = "BALLAST_LOG_FORMAT"
"""Environment variable that tells a worker the form."""
_LEVELS = ("debug", "info", "warning", "error")
MOST_LINES = 10_000
"""Lines that wait to be written; while there are so many, more are dropped, and counted."""
LAST_SECONDS = 2.0
"""For what waits to be written when the process ends."""


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, process, message, and a record's `fields`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """`fields` replace the message, which is their text."""
        fields: dict[str, object] | None = getattr(record, "fields", None)
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            **({"message": record.getMessage()} if fields is None else fields),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class QueuedHandler(logging.Handler):
    """Formats at once, writes later; never waits for `stream`."""

    def __init__(self, stream: TextIO, most_lines: int = MOST_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(most_lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: a record that cannot be formatted is named."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  a log line is no reason to fail
            line = f"a line of {record.name} could not be formatted: {error!r}"
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Writes what waits, if that is possible soon."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=LAST_SECONDS)
            except queue.Full:
                return
            self._thread.join(LAST_SECONDS)
        _let_go(self._stream)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._dropped:
                line += f"\nballast: {self._dropped} lines of the log were dropped here"
                self._dropped = 0
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                self._dropped += 1  # a full disk, a closed pipe: perhaps not for ever


def tell(line: str, stream: TextIO) -> None:
    """Write a line now, if `stream` takes it: a full disk is no reason to stop serving."""
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """What `stream` still holds and cannot write would make Python's exit code 120."""
    try:
        stream.flush()
    except ValueError:
        return  # it is closed
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def set_up(process: str, form: str, level: str) -> None:
    """Write this process's log to stderr: Ballast's from `level` on, others' warnings.

    `process` names it in every line. Workers started later follow. Raises ConfigError.
    """
    if form not in FORMATS:
        raise ConfigError("--log-format", form, f"known: {', '.join(FORMATS)}")
    if level not in _LEVELS:
        raise ConfigError("--log-level", level, f"known: {', '.join(_LEVELS)}")
    text = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("ballast").setLevel(level.upper())
    os.environ[FORMAT_VARIABLE] = form
    atexit.register(handler.close)
