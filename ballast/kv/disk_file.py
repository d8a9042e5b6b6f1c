"""Read and write KV blocks in a file that outlives the server: an SQLite database of its own.

Used by `kv.disk_tier`, on one thread. SQLite reads by `pread`, so that a file that is truncated or
overwritten beneath it is an error and not a signal; it is there wherever Python is. The file is
private to the user and to one server at a time, and bounded in size. Nothing in it is needed: where
it cannot be used, KV is computed, and the file removed, so that it keeps no KV that nobody manages.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ballast import __version__
from ballast.core.errors import DeviceError
from ballast.core.units import KiB
from ballast.kv.tier_shelf import KvBlock

FORMAT = f"1 of Ballast {__version__}"
"""What another version wrote is not read: its KV may have been computed otherwise."""
NAME = "kv.sqlite"
_PAGE = 32 * KiB
_SLACK = 1.1
"""Size of the file as a multiple of its blocks' bytes, at most."""
_TABLE = """CREATE TABLE IF NOT EXISTS blocks (
    name BLOB PRIMARY KEY, parent BLOB, model TEXT, tenant TEXT, n_bytes INTEGER, seconds REAL,
    checksum INTEGER, data BLOB)"""
_LIST = """SELECT name, parent, n_bytes, model, tenant, seconds, checksum FROM blocks
    ORDER BY rowid"""
_TYPES = (bytes, bytes, int, str, str, float, int)
"""Types of a row of `_LIST`."""


class DiskFile:
    """Blocks by name. All methods raise DeviceError where the file cannot be used."""

    def __init__(self, directory: Path, capacity: int) -> None:
        """Open or make the file in a directory, which must be the user's own."""
        self.path = directory / NAME
        self.found_unusable = ""
        """Why what was there has been removed; empty: it was not."""
        self.found: list[tuple[KvBlock, int]] = []
        """Blocks that were there when it was opened, and their checksums, the oldest first."""
        try:
            self._inode = _make_private(directory, self.path)
            try:
                self._open(capacity)
            except sqlite3.OperationalError as error:
                if "locked" in str(error):
                    raise DeviceError("kv_disk", f"{directory} is in use by a server") from error
                self._start_anew(capacity, str(error))
            except sqlite3.DatabaseError as error:
                self._start_anew(capacity, str(error))
        except OSError as error:
            raise DeviceError("kv_disk", f"{directory}: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise DeviceError("kv_disk", f"{directory}: {error}") from error

    def write(self, blocks: Iterable[tuple[KvBlock, int, bytes]]) -> bool:
        """Write blocks with their checksums and bytes: all of them, or none. Returns False where
        the disk has no room for them."""
        rows = (
            (b.name, b.parent, b.model, b.tenant, b.n_bytes, b.seconds, checksum, data)
            for b, checksum, data in blocks
        )
        if not self._is_there():
            raise DeviceError("kv_disk", f"{self.path} is not there any more")
        try:
            with _faults(), self._file:
                self._file.executemany("REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        except DeviceError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                return False
            raise
        return True

    def read(self, name: bytes) -> bytes | None:
        """Return a block's bytes, whatever they are now; None: it is not there."""
        with _faults():
            row = self._file.execute("SELECT data FROM blocks WHERE name = ?", (name,)).fetchone()
        return None if row is None or not isinstance(row[0], bytes) else row[0]

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete blocks, and overwrite their bytes in the file."""
        with _faults(), self._file:
            self._file.executemany("DELETE FROM blocks WHERE name = ?", ((n,) for n in names))

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._file.close()

    def discard(self) -> bool:
        """Close and remove the file; returns whether no KV is left of it."""
        self.close()
        try:
            if self._is_there():
                self._remove()
        except OSError:
            return False
        return True

    def _is_there(self) -> bool:
        """Return whether the path still leads to the file that was opened."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._inode

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.with_name(f"{NAME}-journal").unlink(missing_ok=True)

    def _open(self, capacity: int) -> None:
        self._file = file = sqlite3.connect(
            self.path, timeout=0, isolation_level="IMMEDIATE", check_same_thread=False
        )
        try:
            most = int(capacity * _SLACK) // _PAGE + 64
            for pragma in (
                f"page_size = {_PAGE}",
                "mmap_size = 0",
                "locking_mode = EXCLUSIVE",
                "journal_mode = TRUNCATE",
                "synchronous = OFF",
                "secure_delete = ON",
                f"max_page_count = {most}",
            ):
                file.execute(f"PRAGMA {pragma}")
            with file:
                file.execute("CREATE TABLE IF NOT EXISTS format (version TEXT)")
                file.execute(_TABLE)
                version = file.execute("SELECT version FROM format").fetchone()
                if version is None:
                    file.execute("INSERT INTO format VALUES (?)", (FORMAT,))
            if version is not None and version[0] != FORMAT:
                raise sqlite3.DatabaseError(f"it has format {version[0]}")
            self.found = [_found(row) for row in file.execute(_LIST)]
        except BaseException:
            file.close()
            raise

    def _start_anew(self, capacity: int, why: str) -> None:
        """Remove what is there, which is of another version or damaged."""
        self.found_unusable = why
        self._remove()
        self._inode = _make_private(self.path.parent, self.path)
        self._open(capacity)


def is_left(directory: Path) -> bool:
    """Return whether KV is in a file that this server could not open, unless another one uses it
    and keeps it in order."""
    path = directory / NAME
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=0, uri=True)
        ) as file:
            return bool(file.execute("SELECT EXISTS (SELECT 1 FROM blocks)").fetchone()[0])
    except sqlite3.Error as error:
        return "locked" not in str(error) and path.exists()


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise DeviceError("kv_disk", str(error)) from error


def _found(row: tuple[object, ...]) -> tuple[KvBlock, int]:
    """Return a block that was there, and its checksum. Raises DatabaseError for what no server has
    written."""
    values: tuple[Any, ...] = row
    if len(row) != len(_TYPES) or not all(map(isinstance, row, _TYPES)):
        raise sqlite3.DatabaseError("a row is damaged: a value of another type")
    *_, n_bytes, _, _, seconds, checksum = values
    if n_bytes < 1 or not 0 <= seconds < math.inf or checksum < 0:
        raise sqlite3.DatabaseError("a row is damaged: a number out of its range")
    return KvBlock(*values[:-1]), checksum


def _make_private(directory: Path, file: Path) -> tuple[int, int]:
    """Make the directory and file, for this user alone; return the file's device and inode. Raises
    OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(None, "it is a link, or another user's")
    directory.chmod(0o700)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(file, flags, 0o600)
    try:
        os.fchmod(fd, 0o600)
        made = os.fstat(fd)
    finally:
        os.close(fd)
    return made.st_dev, made.st_ino
