"""The story in a file, as JSON lines, as long as the file takes them."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class StoryFile:
    """A sink. What a full disk does not take is missing from the file, and the log says so once."""

    def __init__(self, path: str) -> None:
        """What is there stays: a worker that replaces another goes on with its story, whose last
        lines were written when they were told. Raises OSError if it cannot be opened."""
        self._path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._complete = True

    def write(self, entry: dict[str, Any]) -> None:
        """One more line; never raises for what the file does."""
        try:
            self._file.write(json.dumps(entry) + "\n")
        except OSError as error:
            if self._complete:
                log.error("%s cannot be written, entries will be missing: %s", self._path, error)
            self._complete = False

    def close(self) -> None:
        """What is not written yet is, if that is possible."""
        with suppress(OSError):
            self._file.close()
