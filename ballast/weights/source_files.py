"""Identify the files that a model was loaded from, so that a change of any of them is noticed.

By place in the file system, size and times of each file, as `ballast.weights.origin` does for one
segment: no bytes are read. Which weights those are, the digests of the sealed segments tell.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ballast.core.settings import ModelSettings
from ballast.weights.config import CONFIG, GENERATION
from ballast.weights.stored import INDEX

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
_READ = (CONFIG, GENERATION, INDEX, "modules.json")
"""Files, beside those of tensors, that decide what a model computes."""
_TENSORS = (".safetensors", ".gguf")


def identity(settings: ModelSettings) -> str:
    """Return a hex SHA-256 over the identities of a model's and its adapters' files, those that are
    there: what is missing, reading them tells."""
    paths = [*_files(Path(settings.path)), *_adapters_files(settings)]
    found = [_of(path) for path in paths]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def listing(settings: ModelSettings) -> str:
    """Return a hex SHA-256 over names, sizes and times of a model's and its adapters' files, equal
    on all hosts that see the same files or copies of them; empty: a file is missing."""
    paths = [*_files(Path(settings.path)), *_adapters_files(settings)]
    try:
        found = [(path.name, (s := path.stat()).st_size, s.st_mtime_ns) for path in paths]
    except OSError:
        return ""
    known = any(name.endswith(_TENSORS) for name, _, _ in found)
    return hashlib.sha256(repr(found).encode()).hexdigest() if known else ""


def _adapters_files(settings: ModelSettings) -> list[Path]:
    names = (ADAPTER_CONFIG, ADAPTER_TENSORS)
    return [Path(adapter.path, name) for adapter in settings.adapters for name in names]


def _of(path: Path) -> tuple[object, ...]:
    try:
        s = path.stat()
    except OSError:
        return (str(path),)
    return (str(path), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint that are read, in order of their names."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        if name in _READ or name.endswith(_TENSORS):
            yield directory / name
