"""Read and write the file in which operators' changes survive a restart of the server.

Used by `fleet.fleet_source` only.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from ballast.core.errors import ConfigError, NotKept
from ballast.fleet.atomic_file import locked, replace
from ballast.fleet.changes import Changes


class ChangesFile:
    """The changes there are: on disk, or, without a path, as long as the process lives."""

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else path.resolve()
        self.changes = Changes()
        """The changes as last read or written."""
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
                with locked(self.path.parent) as directory:
                    if _content(self.path) != self._seen:
                        why = "somebody else has changed it since; SIGHUP reads it again"
                        raise NotKept(f"changes cannot be kept in {self.path}: {why}")
                    replace(self.path, data)
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
