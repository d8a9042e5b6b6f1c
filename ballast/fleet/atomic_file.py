"""Replace small files atomically, under a lock of their directory, for several writing processes.

Used for operators' changes (`fleet.changes_file`) and the choice of kernels
(`kernels.choice_file`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_TRIES, _BETWEEN_SECONDS = 50, 0.1
"""To get the directory's lock, which others hold for milliseconds."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Keep other processes from writing meanwhile; yields the directory's descriptor. A lock on the
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


def replace(path: Path, data: bytes) -> None:
    """Write `data` to `path` wholly or not at all. Raises OSError."""
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
