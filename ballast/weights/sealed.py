"""Hold one segment's bytes in a memfd that is filled, sealed, and mapped read only.

The unit of the host tier (`ballast.weights.host`); other processes can map it by its descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap as std_mmap
import os
from concurrent.futures import ThreadPoolExecutor

from ballast.core.errors import DeviceError
from ballast.core.units import ceil_div, format_bytes
from ballast.memory import syscalls
from ballast.memory.address_space import map_aligned
from ballast.memory.host_memory import available
from ballast.weights.segment import Fill, Piece, Segment, whole_pages

_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALS = _SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SealedSegment:
    """The memory of one segment, held by any number of models: a memfd, mapped read only."""

    def __init__(self, fd: int, n_bytes: int, digest: str) -> None:
        """Take over `fd`. Raises DeviceError if it is no sealed file of this size, OSError if it
        cannot be mapped; it is closed then."""
        self.holds = 0
        self.n_bytes = n_bytes
        self.digest = digest
        self.fd = fd
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE == _SIZE
            if not sealed or os.fstat(fd).st_size != n_bytes:
                raise DeviceError("host tier", "another process's segment is none")
            self.address = map_aligned(fd, n_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def filled(
        cls, model: str, segment: Segment, fill: Fill, threads: int, writable: bool = False
    ) -> SealedSegment:
        """Allocate memory, call `fill` for every piece from several threads, and seal it;
        `writable`: against a change of size only."""
        n_bytes = whole_pages(segment)
        check_available(model, segment.name, n_bytes)
        try:
            fd = os.memfd_create(f"ballast-{model}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, n_bytes)
                digest = _filled(fd, n_bytes, segment, fill, threads)
                seal(fd, writable)
            except BaseException:
                os.close(fd)
                raise
            return cls(fd, n_bytes, digest)
        except OSError as error:
            raise no_memory(model, n_bytes, error) from error

    def close(self) -> None:
        """Free the memory, unless another process has it too."""
        syscalls.munmap(self.address, self.n_bytes)
        os.close(self.fd)


def seal(fd: int, writable: bool) -> None:
    """Seal a memfd; `writable`: against a change of size only. Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE if writable else SEALS)


def digest_of(fd: int, segment: Segment) -> str:
    """Return the digest of a segment whose bytes are in `fd`, from these bytes alone. Raises
    ValueError for a layout that does not fit them."""
    size = os.fstat(fd).st_size
    if any(t.offset < 0 or t.n_bytes < 0 or t.offset + t.n_bytes > size for t in segment.tensors):
        raise ValueError("a tensor beyond its segment")
    total = _layout(segment)
    shared, reads = std_mmap.MAP_SHARED, std_mmap.PROT_READ
    with std_mmap.mmap(fd, size, shared, reads) as content, memoryview(content) as view:
        for piece in _pieces(segment, 0):
            total.update(hashlib.sha256(view[piece.address :][: piece.n_bytes]).digest())
    return total.hexdigest()


def _layout(segment: Segment) -> hashlib._Hash:
    """Begin a digest with a segment's layout, without names."""
    layout = [(t.shape, t.dtype, t.layout, t.offset, t.n_bytes) for t in segment.tensors]
    return hashlib.sha256(repr((segment.n_bytes, layout)).encode())


def _pieces(segment: Segment, base: int) -> list[Piece]:
    return [
        Piece(t, start, min(t.piece_bytes, t.n_bytes - start), base + t.offset + start)
        for t in segment.tensors
        for start in range(0, t.n_bytes, t.piece_bytes)
    ]


def _filled(fd: int, n_bytes: int, segment: Segment, fill: Fill, threads: int) -> str:
    """Fill all pieces; returns the hex SHA-256 over the layout (without names) and the pieces'
    digests."""
    write = syscalls.PROT_READ | syscalls.PROT_WRITE
    base = syscalls.mmap(0, n_bytes, write, syscalls.MAP_SHARED, fd)

    def work(piece: Piece) -> bytes:
        # Allocate now: missing memory is an error here, but a signal when it is written.
        page = std_mmap.PAGESIZE
        first = (piece.address - base) // page * page
        end = ceil_div(piece.address - base + piece.n_bytes, page) * page
        syscalls.fallocate(fd, 0, first, end - first)
        return fill(piece)

    total = _layout(segment)
    pool = ThreadPoolExecutor(threads, "fill")
    try:
        for digest in pool.map(work, _pieces(segment, base)):
            total.update(digest)
        return total.hexdigest()
    finally:
        # No thread may write once the mapping is gone.
        pool.shutdown(wait=True, cancel_futures=True)
        syscalls.munmap(base, n_bytes)


def check_available(model: str, segment: str, n_bytes: int) -> None:
    """Refuse a segment for which memory does not suffice, as the kernel would kill a process
    instead."""
    try:
        left, who = available()
    except (OSError, LookupError):  # unknown here
        return
    if n_bytes > left:
        raise DeviceError(
            "host tier",
            f"{segment} of {model} takes {format_bytes(n_bytes)} of host memory, "
            f"{format_bytes(left)} are available ({who}); free some, or serve fewer models",
        )


def no_memory(name: str, n_bytes: int, error: OSError) -> DeviceError:
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EAGAIN):
        return DeviceError(
            "host tier",
            f"no host memory for another {format_bytes(n_bytes)} of {name}'s weights "
            f"({error.strerror}); free some, or serve fewer models",
        )
    return DeviceError("host tier", f"{name}: {error}")
