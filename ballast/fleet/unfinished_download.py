"""Recognize an unfinished download by what it leaves in a checkpoint's directory.

Used where a file of a checkpoint or an adapter is missing or cannot be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PARTIAL = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download")
"""Endings of files that a download has not completed: of the hub's library, curl and browsers."""
_LFS_POINTER = b"version https://git-lfs"
"""Start of the text that Git without LFS leaves in place of a large file."""


def unfinished(directory: Path) -> str | None:
    """Describe what is left of an unfinished download in `directory`; None if nothing is."""
    try:
        found = next((f"{path.name}, {why}" for path, why in _leftovers(directory)), None)
    except OSError:  # the directory itself: its own fault is named
        return None
    return None if found is None else f"an unfinished download: {found}"


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left a pointer in place of this file."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def _leftovers(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that a download has not completed, and how that shows."""
    for path in sorted(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # a download ends at any moment
            if (why := _fault_of(path)) is not None:
                yield path, why
    yield from ((path, "is not complete") for path in _of_the_hub(directory))


def _fault_of(path: Path) -> str | None:
    """Return why a file is not whole; None if it seems to be. Raises FileNotFoundError."""
    if path.name.endswith(_PARTIAL):
        return "is not complete"
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which is not there"
    if path.is_file() and is_lfs_pointer(path):
        return "is a pointer of Git LFS, which `git lfs pull` replaces by the file"
    if path.suffix in (".json", ".safetensors") and path.is_file() and not path.stat().st_size:
        return "is empty"
    return None


def _of_the_hub(directory: Path) -> Iterator[Path]:
    """Yield files that the hub's library was downloading to this directory, or to the cache that it
    is a snapshot of."""
    yield from sorted((directory / ".cache" / "huggingface" / "download").rglob("*.incomplete"))
    if directory.parent.name == "snapshots":
        yield from sorted((directory.parent.parent / "blobs").glob("*.incomplete"))
