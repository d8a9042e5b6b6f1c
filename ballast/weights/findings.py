"""Keep what the examination of a checkpoint has found in the user's cache directory.

Examining configuration, headers and tokenizer takes a limited child process and, for the first of
them, seconds of imports. What was found holds as long as the files, this code, the libraries and
the CPU stay the same, which are the key. It is only a cache: what cannot be read is examined again,
and what cannot be written is not kept. Used by workers, in place of the isolation that they wrap.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic

import msgspec

from ballast import __version__
from ballast.core.units import MiB
from ballast.fleet.atomic_file import replace
from ballast.isolation.calls import A, Isolation, R
from ballast.kernels.choice_file import cpu_facts, default_path

log = logging.getLogger(__name__)

VARIABLE = "BALLAST_FINDINGS"
"""Environment variable: the directory; empty: nothing is kept."""
DIRECTORY = "findings"
MOST_FILES, MOST_BYTES, LARGEST = 512, 128 * MiB, 16 * MiB
"""Bounds of the directory, whose oldest files go first, and of one file."""
_MOST_LISTED = 4096
"""Most files of a checkpoint's directory: one with more is examined each time."""


class Findings:
    """Results by key, one file each; safe for several processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def of_user(cls) -> Findings | None:
        """By `BALLAST_FINDINGS`, else beside the choices of kernels. None: nothing is kept."""
        named = os.environ.get(VARIABLE)
        if named is not None:
            return cls(Path(named)) if named else None
        choices = default_path()
        return None if choices is None else cls(choices.parent / DIRECTORY)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        try:
            return not any(os.scandir(self._directory))
        except OSError:
            return True

    def find(self, key: str, kind: type[R]) -> R | None:
        """Return what is kept as `key`, the newest from now on; None: nothing of this type is."""
        path = self._directory / key
        try:
            if path.stat().st_size > LARGEST:
                return None
            found = msgspec.msgpack.decode(path.read_bytes(), type=kind, dec_hook=_decoded)
            os.utime(path)
        except (OSError, msgspec.MsgspecError, ValueError):
            return None
        return found

    def keep(self, key: str, found: object) -> None:
        """Keep a result, and drop the oldest ones beyond the bounds."""
        data = msgspec.msgpack.encode(found, enc_hook=str)
        if len(data) > LARGEST:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(self._directory / key, data)
            self._prune()
        except OSError as error:
            log.debug("what was found is not kept: %s", error)

    def _prune(self) -> None:
        with os.scandir(self._directory) as entries:
            files = [(s.st_mtime_ns, s.st_size, e.path) for e in entries if (s := e.stat())]
        total = 0
        for i, (_, size, path) in enumerate(sorted(files, reverse=True)):
            total += size
            if i >= MOST_FILES or total > MOST_BYTES:
                os.unlink(path)


class RememberingIsolation:
    """Isolation that calls a function only where its result for the same files is not kept.

    The argument has the directory of the files as its `settings.path` or `directory`, or is it; the
    results of others are not kept.
    """

    def __init__(self, isolation: Isolation, findings: Findings) -> None:
        self._isolation, self._findings = isolation, findings

    def call(self, function: Callable[[A], R], argument: A, result: type[R]) -> R:
        key = _key(function, argument)
        if key is None:
            return self._isolation.call(function, argument, result)
        kept = self._findings.find(key, _Found[result])  # type: ignore[valid-type]
        if kept is not None:
            return kept.result
        found = self._isolation.call(function, argument, result)
        if _key(function, argument) == key:  # no file has changed meanwhile
            self._findings.keep(key, _Found(found))
        return found


class _Found(msgspec.Struct, Generic[R]):
    result: R


def _key(function: Callable[[A], R], argument: A) -> str | None:
    """Return what decides the result, hashed; None: it cannot be told."""
    directory = _directory_of(argument)
    files = [] if directory is None else list(_files(directory))
    if not files or len(files) > _MOST_LISTED:
        return None
    called = f"{function.__module__}.{function.__qualname__}"
    facts = repr((called, argument, files, _surroundings()))
    return hashlib.sha256(facts.encode()).hexdigest()


def _directory_of(argument: object) -> Path | None:
    """Return the directory that an argument is or names; None: it names none."""
    settings = getattr(argument, "settings", None)
    named = getattr(settings, "path", None) or getattr(argument, "directory", argument)
    return Path(named) if isinstance(named, str | os.PathLike) else None


def _files(directory: Path) -> Iterator[tuple[object, ...]]:
    """Yield the identity of each file of a checkpoint: place in the file system, size, times."""
    for above, _, names in os.walk(directory):
        for name in sorted(names):
            path = os.path.join(above, name)
            try:
                s = os.stat(path)
            except OSError:
                continue
            yield (path, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)


@functools.cache
def _surroundings() -> tuple[object, ...]:
    """Return the versions and the machine on which an examination depends."""
    libraries = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    versions = [importlib.metadata.version(name) for name in libraries]
    code = Path(__file__).parent.parent
    sources = [
        (str(path.relative_to(code)), s.st_size, s.st_mtime_ns)
        for part in ("core", "fleet", "isolation", "models", "weights")
        for path in sorted((code / part).rglob("*.py"))
        if (s := path.stat())
    ]
    return (__version__, sources, versions, sys.version, platform.machine(), cpu_facts())


def _decoded(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
