"""The story in a file, as JSON lines, as long as the file takes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ballast.core.entries import Entry

log = logging.getLogger(__name__)


class StoryFile:
    """A sink. What a full disk does not take is missing from the file, which says so as soon as it
    takes something again; the log says so once. Several devices may write to one file."""

    def __init__(self, path: str | Path, device: str) -> None:
        """What is there stays: a worker that replaces another goes on with its story, whose last
        lines were written when they were told. Raises OSError if it cannot be opened."""
        import msgspec  # here: where no story is written to a file, it need not be installed

        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._begin = b'{"device":' + self._encode(device) + b","
        self._torn = _ends_within_a_line(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._missing = 0
        """Entries that the file has not taken since it last took some."""
        self._said = False

    def write(self, entries: Sequence[Entry]) -> None:
        """More lines, at once; never raises for what the file does."""
        lines = [b"\n"] if self._torn else []
        if self._missing:
            lines.append(self._line({"missing": self._missing}))
        lines += map(self._line, entries)
        left = memoryview(b"".join(lines))
        try:
            while left:
                left = left[os.write(self._file, left) :]
                self._torn = bool(left)
            self._missing = 0
        except OSError as error:
            self._missing += len(entries)
            if not self._said:
                log.error("%s cannot be written, entries will be missing: %s", self._path, error)
            self._said = True

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    def _line(self, entry: Entry) -> bytes:
        return self._begin + self._encode(entry)[1:] + b"\n"


def _ends_within_a_line(path: str | Path) -> bool:
    """Whether whoever wrote to the file before died doing so."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")
