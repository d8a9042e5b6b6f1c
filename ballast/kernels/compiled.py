"""Compile kernels by Numba, and keep the machine code on disk where a directory can be written.

Numba refuses to compile with a cache that it cannot place. Here a machine without one, as with a
file system that is read only or full, compiles its kernels anew at each start. Numba also takes
machine code from the cache as long as a kernel's own file is as it was, whatever became of the
files whose functions it calls. Here code of other sources is removed, and what is kept is taken
without the typing of all that Numba could compile, which takes half a second to load.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from ballast.fleet.atomic_file import locked, replace

log = logging.getLogger(__name__)

_TRIAL_BYTES = 1 << 16
"""Bytes written for a moment to see whether there is room: less than one kernel takes."""
_MARK = "ballast-kernels.sha256"
"""File beside the machine code, with the digest of the sources that it was compiled from."""
_found_empty = False
"""Whether `cache_directory` found no code of these sources."""


@functools.cache
def cache_directory() -> Path | None:
    """Directory of compiled kernels: in `NUMBA_CACHE_DIR`, else beside the source, else in the
    user's cache directory; the first that can be written. None: there is none."""
    global _found_empty
    try:
        path = Path(njit(cache=True)(_trial).stats.cache_path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(os.urandom(_TRIAL_BYTES))
        if not keep_only(path, digest_of(Path(__file__).parent.glob("*.py"))):
            _found_empty = True
            log.info("kernels are compiled for this machine: minutes, once; kept in %s", path)
    except (OSError, RuntimeError):  # Numba's, for a function that it finds no place for
        return None
    return path


@functools.cache
def was_empty() -> bool:
    """Whether nothing that these sources compile to was kept when this process first looked."""
    return cache_directory() is not None and _found_empty


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


def digest_of(sources: Iterable[Path]) -> str:
    """Return a hex digest of source files, in the order of their names, and Numba's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for file in sorted(sources):
        text = file.read_bytes()
        digest.update(f"\0{file.name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def keep_only(directory: Path, digest: str) -> bool:
    """Remove machine code from `directory` that was not compiled from the sources of this digest;
    returns whether they are those of the last start. Raises OSError."""
    mark = directory / _MARK
    with locked(directory):
        if mark.is_file() and mark.read_text() == digest:
            return True
        for file in directory.glob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        replace(mark, digest.encode())
    return False


class _KeptCode(FunctionCache):  # type: ignore[misc]  # Numba has no types
    """Numba's cache, which loads machine code for a target that need not be able to compile."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code of a signature; None: there is none, and Numba compiles it, for which it
        prepares the target itself."""
        rtsys.initialize(target_context)  # the functions that machine code may call
        return self._load_overload(sig, target_context)


def compiled(signature: Any, kernel: Any) -> Any:
    """Compile a C function, or take it from the cache; while another process compiles it, wait for
    that."""
    if is_kept():
        try:
            with _alone(kernel):
                return _c_function(signature, kernel, kept=True)
        except OSError as error:  # of the cache: the disk is full by now, say
            log.warning("a kernel is not kept for the next start: %s", error)
    return _c_function(signature, kernel, kept=False)


def _c_function(signature: Any, kernel: Any, *, kept: bool) -> Any:
    """As `numba.cfunc`, with a cache of our own."""
    normal = sigutils.normalize_signature(signature)
    made = CFunc(kernel, normal, locals={}, options={"error_model": "numpy"})
    if kept:
        made._cache = _KeptCode(kernel)  # type: ignore[attr-defined]
    made.compile()
    return made


@contextlib.contextmanager
def _alone(kernel: Any) -> Iterator[None]:
    """Hold the lock of a kernel, which ends with the process. Raises OSError."""
    directory = cache_directory()
    assert directory is not None
    name = hashlib.sha256(f"{kernel.__module__}.{kernel.__qualname__}".encode()).hexdigest()[:16]
    with open(directory / f"{name}.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _trial() -> None:
    """A function to find the cache of; it is never compiled."""
