"""The file in which operators' changes survive a restart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from ballast.core.errors import ConfigError, NotKept
from ballast.fleet.changes import Changes

_TRIES, _BETWEEN_SECONDS = 50, 0.1
"""To get the directory's lock, which others hold for milliseconds."""


class Kept:
    """The changes there are: on disk, or, without a path, as long as the process lives."""

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else path.resolve()
        self.changes = Changes()
        """As last read or written."""
        self._seen: bytes | None = None
        """The file's content; None: there is none."""

    def read(self) -> Changes:
        """Raises ConfigError, which names the file, if it is damaged or cannot be read."""
        if self.path is None:
            return self.changes
        try:
            data = _content(self.path)
            changes = Changes() if data is None else Changes.model_validate_json(data)
        except OSError as error:
            raise ConfigError("changes", str(self.path), f"it cannot be read: {error}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            why = f"it is damaged ({where}: {first['msg']}); repair it, or delete it to forget them"
            raise ConfigError("changes", str(self.path), why) from None
        self._seen, self.changes = data, changes
        return changes

    def write(self, changes: Changes) -> None:
        """When it returns, they survive whatever happens to the process or the machine.

        Raises NotKept, and the file is as it was.
        """
        if self.path is not None and changes != self.changes:
            data = changes.model_dump_json(indent=1, exclude_unset=True).encode() + b"\n"
            try:
                with _locked(self.path.parent) as directory:
                    if _content(self.path) != self._seen:
                        why = "somebody else has changed it since; SIGHUP reads it again"
                        raise NotKept(f"changes cannot be kept in {self.path}: {why}")
                    _replace(self.path, data)
                    os.fsync(directory)
            except OSError as error:
                raise NotKept(f"changes cannot be kept in {self.path}: {error.strerror}") from error
            self._seen = data
        self.changes = changes


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Keep other servers from writing meanwhile; yields the directory's descriptor. A lock on the
    file itself would go with it when it is replaced. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(_BETWEEN_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    """Wholly or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
