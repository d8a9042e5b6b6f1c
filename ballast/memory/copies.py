"""Describe copies between addresses, make them at once, or cut them into batches for a link."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ballast.core.errors import DeviceError
from ballast.core.units import KiB
from ballast.memory import syscalls


@dataclass(frozen=True, slots=True)
class Copy:
    """`n_bytes` from address `src` to address `dst`; the two do not overlap."""

    dst: int
    src: int
    n_bytes: int
    touched: bool = False
    """Whether the target has been written since it was mapped, and stays mapped during the copy."""


_PREFAULT_BYTES = 256 * KiB
"""Bytes of a copy's target that are entered into the page tables at a time, if they are not yet: a
fresh mapping fills about 1.5 times faster than by faults, and a missing one is an error instead of
a fatal signal. Entering present pages takes half as long as the copy, checking a tenth."""


def copy_now(dst: int, src: int, n_bytes: int) -> None:
    """Copy bytes before returning; releases the GIL. Raises DeviceError for invalid arguments.

    Both sides must be mapped: for pages that may have been unmapped, use a link.
    """
    if n_bytes < 0 or dst <= 0 or src <= 0:
        raise DeviceError("memmove", f"{n_bytes} bytes from {src:#x} to {dst:#x}")
    ctypes.memmove(dst, src, n_bytes)


CopyBytes = Callable[[int, int, int], object]
"""Copies as `ctypes.memmove` does, whose arguments it has."""


def copy_checked(copy: Copy, copy_bytes: CopyBytes = ctypes.memmove) -> None:
    """Copy like `copy_now`, for a target that is freshly mapped, or, by an error, not mapped."""
    if copy.n_bytes < 0 or copy.dst <= 0 or copy.src <= 0:
        raise DeviceError("memmove", f"{copy.n_bytes} bytes from {copy.src:#x} to {copy.dst:#x}")
    if copy.touched or syscalls.is_present(copy.dst, copy.n_bytes):
        copy_bytes(copy.dst, copy.src, copy.n_bytes)
        return
    for at in range(0, copy.n_bytes, _PREFAULT_BYTES):
        n = min(_PREFAULT_BYTES, copy.n_bytes - at)
        try:
            syscalls.prefault(copy.dst + at, n)
        except OSError as error:
            raise DeviceError("madvise", f"{copy.dst + at:#x}: {error.strerror}") from error
        ctypes.memmove(copy.dst + at, copy.src + at, n)


def batches(copies: Sequence[Copy], chunk_bytes: int, chunks: int) -> Iterator[list[Copy]]:
    """Cut copies into chunks, and gather them, small ones too, up to the bytes of `chunks`."""
    most = chunk_bytes * chunks
    batch: list[Copy] = []
    size = 0
    for copy in copies:
        for at in range(0, max(copy.n_bytes, 1), chunk_bytes):
            n = min(chunk_bytes, copy.n_bytes - at)
            if batch and size + n > most:
                yield batch
                batch, size = [], 0
            batch.append(Copy(copy.dst + at, copy.src + at, n, copy.touched))
            size += n
    if batch:
        yield batch
