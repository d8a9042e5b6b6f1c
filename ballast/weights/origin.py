"""Identify a segment's bytes without reading them, by the files that they come from.

Workers share host segments of equal origin before loading them. A file is distinguished from its
earlier contents, and from any other file, by its place in its file system, its size, and the times
of its last changes, of which one (`ctime`) is kept by the kernel and cannot be set by programs.
Like other tools that rely on these, this cannot see writes through a mapping before they reach the
file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping

from ballast import __version__
from ballast.weights.assemble import Recipe, Sources
from ballast.weights.segment import Segment
from ballast.weights.stored_tensor import StoredTensor

QUIET_SECONDS = 2.0
"""Seconds since a file's last change within which it may change again and show the same time."""

File = tuple[int, ...]


def origin_of(
    segment: Segment,
    plan: Mapping[str, Recipe],
    sources: Sources,
    absent: Callable[[str], bool] = lambda name: False,
) -> str | None:
    """Return a hex SHA-256 of the segment's sources and layout, and this version of Ballast: equal
    only for equal bytes. None if a file has changed too recently to be sure.

    `absent`: whether a tensor is not read, but filled with zeros.
    """
    files: dict[str, File] = {}
    parts: list[object] = [__version__, segment.n_bytes]
    for t in segment.tensors:
        parts.append((t.shape, t.dtype, t.layout, t.form, t.offset, t.n_bytes))
        for name in t.sources:
            recipe = plan[name]
            if absent(name):
                parts.append(recipe.shape)
                continue
            for run in recipe.runs:
                for stored in run.source.files:
                    path = str(stored.path)
                    if path not in files:
                        found = _file(sources.descriptor(stored))
                        if found is None:
                            return None
                        files[path] = found
                    parts.append((files[path], stored.dtype, stored.start))
                parts.append((_meaning(run.source), run.start, run.n, recipe.shape))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _meaning(source: StoredTensor) -> tuple[object, ...]:
    """What decides, beside the bytes of its files, which elements a tensor has."""
    packing = source.packing
    if packing is None:
        return source.heads, source.transposed
    return (*(getattr(packing, f) for f in ("format", "form", "bits", "scale_rows", "numbers")),)


def _file(descriptor: int) -> File | None:
    found = os.fstat(descriptor)
    changed = max(found.st_mtime, found.st_ctime)
    if time.time() - changed < QUIET_SECONDS:
        return None
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_dev, found.st_ino, found.st_size, *times)
