"""Write a device's story to files as JSON lines, in parts of bounded size.

Used by live devices with `story:` in the fleet file, and read by `ballast.sim.story_reader`. A full
disk never stops the device: entries that cannot be written are lost, and the file says so.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ballast.core.entries import StoryEntry

log = logging.getLogger(__name__)

MODE = 0o600
"""Mode of story files: ids of requests and texts of errors are for the server's user only."""


class StoryFile:
    """Sink that writes entries to a file. Entries that a full disk refuses are lost; the file notes
    the gap as soon as a write succeeds again, and the log once. Several devices, each a process,
    may write to one file: each write consists of whole lines.

    With `most_bytes` the file rotates: before it would grow beyond that it becomes `PATH.N`, N
    rising from 1, and a new one begins at `PATH`; of the older parts the newest `parts` stay.
    A file that somebody else has moved away is begun anew as well.
    """

    def __init__(
        self,
        path: str | Path,
        device: str,
        most_bytes: int | None = None,
        parts: int = 1,
    ) -> None:
        """Open the file to append: a worker that replaces another continues its story, whose last
        lines were written when they happened. Raises OSError if it cannot be opened."""
        import msgspec  # here: where no story is written to a file, it need not be installed

        self._path = Path(path)
        self._encode = msgspec.json.Encoder().encode
        self._begin = b'{"device":' + self._encode(device) + b","
        self._torn = _ends_within_a_line(self._path)
        self._file = self._open()
        regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        self._most_bytes = most_bytes if regular else None
        """Size at which the file rotates, in bytes; None: it does not rotate, or cannot."""
        self._parts = parts
        self._missing = 0
        """Number of entries lost since the last successful write."""
        self._complained = False

    def write(self, entries: Sequence[StoryEntry]) -> None:
        """Append entries in one write; never raises for errors of the file."""
        lines = [b"\n"] if self._torn else []
        if self._missing:
            lines.append(self._line({"missing": self._missing}))
        lines += map(self._line, entries)
        left = memoryview(b"".join(lines))
        if self._most_bytes is not None:
            self._make_room(len(left), self._most_bytes)
        try:
            while left:
                left = left[os.write(self._file, left) :]
                self._torn = bool(left)
            self._missing = 0
        except OSError as error:
            self._missing += len(entries)
            if not self._complained:
                log.error("%s cannot be written, entries will be missing: %s", self._path, error)
            self._complained = True

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    # -- parts ------------------------------------------------------------------------------------

    def _make_room(self, n_bytes: int, most_bytes: int) -> None:
        """Have a file at the path that may grow by `n_bytes`, as long as that can be had."""
        try:
            if self._full(n_bytes, most_bytes):
                fcntl.flock(self._file, fcntl.LOCK_EX)
                # Another device may have been first.
                if self._full(n_bytes, most_bytes):
                    self._rotate()
                    self._begin_anew()  # closing the old file ends the lock
        except OSError as error:
            log.error("%s cannot be rotated, and goes on as it is: %s", self._path, error)
            self._most_bytes = None

    def _full(self, n_bytes: int, most_bytes: int) -> bool:
        """Whether the file at the path has no room. It is the one that is written to, from now on,
        where that has been moved away."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or there.st_ino != os.fstat(self._file).st_ino:
            self._begin_anew()
            return False
        return there.st_size > 0 and there.st_size + n_bytes > most_bytes

    def _rotate(self) -> None:
        before = parts(self._path)
        number = 1 + (_number(before[-1]) if before else 0)
        os.rename(self._path, f"{self._path}.{number}")
        for part in before[: max(0, len(before) + 1 - self._parts)]:
            part.unlink(missing_ok=True)

    def _begin_anew(self) -> None:
        old, self._file = self._file, self._open()
        os.close(old)

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, MODE)

    def _line(self, entry: StoryEntry) -> bytes:
        return self._begin + self._encode(entry)[1:] + b"\n"


def parts(path: Path) -> list[Path]:
    """Return the older parts of the story at `path`, oldest first, without `path` itself."""
    found = path.parent.glob(f"{_escaped(path.name)}.*")
    return sorted((part for part in found if _number(part)), key=_number)


def first_part_is_gone(path: Path) -> bool:
    """Whether parts of the story at `path` have been deleted, and with them its beginning."""
    return any(_number(part) > 1 for part in parts(path)[:1])


def _number(part: Path) -> int:
    """Return the number of a part; 0: the path is not a part."""
    suffix = part.suffix[1:]
    return int(suffix) if suffix.isdecimal() and suffix.isascii() else 0


def _escaped(name: str) -> str:
    """Escape a name for `glob`."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _ends_within_a_line(path: Path) -> bool:
    """Return whether the file ends within a line: its last writer died while writing."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            # Others may append meanwhile, so no more than that byte.
            return file.read(1) not in (b"", b"\n")
    except FileNotFoundError:  # another device has just made a part of it
        return False
