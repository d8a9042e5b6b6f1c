"""Write the logs of all processes in one format, on a thread: a full pipe or disk blocks no caller.

Set up by the command line, the server, each worker and each further rank.
"""

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
"""Environment variable that passes the format to worker processes."""
_LEVELS = ("debug", "info", "warning", "error")
MOST_LINES = 10_000
"""Bound of the lines that wait to be written; further ones are dropped, and counted."""
LAST_SECONDS = 2.0
"""Time to write the waiting lines when the process ends."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line: time (UTC), level, logger, process, message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; its `fields`, if it has any, stand in place of the message."""
        fields: dict[str, object] | None = getattr(record, "fields", None)
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            **({"message": record.getMessage()} if fields is None else fields),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class QueuedHandler(logging.Handler):
    """Formats records at once and writes them on a thread; never waits for `stream`."""

    def __init__(self, stream: TextIO, most_lines: int = MOST_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(most_lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; one that cannot be formatted is replaced by a line that says so."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  a log line is no reason to fail
            line = f"a line of {record.name} could not be formatted: {error!r}"
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the waiting lines, if `stream` takes them within LAST_SECONDS."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=LAST_SECONDS)
            except queue.Full:
                return
            self._thread.join(LAST_SECONDS)
        _discard_unwritable(self._stream)
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


def write_line(line: str, stream: TextIO) -> None:
    """Write a line now; it is lost where `stream` does not take it, as on a full disk."""
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        _discard_unwritable(stream)


def _discard_unwritable(stream: TextIO) -> None:
    """Drop what `stream` cannot write: at exit Python would fail on it, with code 120."""
    try:
        stream.flush()
    except ValueError:
        return  # it is closed
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def set_up_logs(process: str, format: str, level: str) -> None:
    """Write this process's log to stderr: Ballast's from `level` on, and warnings of libraries.

    `process` names the process in every line; workers that are started later use the same format.
    Raises ConfigError for an unknown format or level.
    """
    if format not in FORMATS:
        raise ConfigError("--log-format", format, f"known: {', '.join(FORMATS)}")
    if level not in _LEVELS:
        raise ConfigError("--log-level", level, f"known: {', '.join(_LEVELS)}")
    text = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("ballast").setLevel(level.upper())
    os.environ[FORMAT_VARIABLE] = format
    atexit.register(handler.close)
