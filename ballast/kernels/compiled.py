"""Compile kernels by Numba, and keep the machine code on disk where a directory can be written.

Numba refuses to compile with a cache that it cannot place. Here a machine without one, as with a
file system that is read only or full, compiles its kernels anew at each start.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from numba import cfunc, njit

log = logging.getLogger(__name__)

_TRIAL_BYTES = 1 << 16
"""Bytes written for a moment to see whether there is room: less than one kernel takes."""


@functools.cache
def cache_directory() -> Path | None:
    """Directory of compiled kernels: in `NUMBA_CACHE_DIR`, else beside the source, else in the
    user's cache directory; the first that can be written. None: there is none."""
    try:
        path = Path(njit(cache=True)(_trial).stats.cache_path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(os.urandom(_TRIAL_BYTES))
    except (OSError, RuntimeError):  # Numba's, for a function that it finds no place for
        return None
    return path


@functools.cache
def is_kept() -> bool:
    """Whether compiled kernels are kept for later starts. If not, the log says so once."""
    if cache_directory() is not None:
        return True
    log.warning(
        "kernels are compiled anew at each start, which takes a minute: no directory for them can "
        "be written; name one in NUMBA_CACHE_DIR"
    )
    return False


def compiled(signature: Any, kernel: Any) -> Any:
    """Compile a C function, or take it from the cache."""
    if is_kept():
        try:
            return cfunc(signature, cache=True, error_model="numpy")(kernel)
        except OSError as error:  # of the cache: the disk is full by now, say
            log.warning("a kernel is not kept for the next start: %s", error)
    return cfunc(signature, cache=False, error_model="numpy")(kernel)


def _trial() -> None:
    """A function to find the cache of; it is never compiled."""
