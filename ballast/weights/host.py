"""The host tier: a model's weights in host memory, packed, sealed and read only.

::

    model a   [embeddings 1f..]  [layer 0 a3..]  [layer 1 77..]  [head e0..]
    model b   [embeddings 1f..]  [layer 0 5b..]  ...
               ^ equal layout and bytes: one memfd, held by both

One memfd per distinct segment: it is filled with several threads, then sealed against writing and
any change of size, and mapped read only. So its mappings cannot fault, whatever happens to the
user's own files, and other processes can be given it (docs/decisions/006). Tensors begin at
multiples of 64 bytes within their segment.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap as std_mmap
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ballast.core.errors import DeviceError
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.core.units import MiB, ceil_div, format_bytes
from ballast.memory import syscalls
from ballast.weights.sharding import WHOLE, Shard

PLAIN = "plain"
"""Layout of a tensor that is as it was stored."""
TENSOR_ALIGNMENT = 64
PIECE_BYTES = 4 * MiB
"""Bytes filled and hashed at once by a thread; a multiple of the OS's page and of elements."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor within a segment, contiguous at byte `offset`; `names` of its parameters.

    `layout`: how its elements lie, and `sources`: the architecture's tensors, by name, that they
    come from (`ballast.weights.packing`).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    offset: int
    n_bytes: int
    layout: str
    sources: tuple[str, ...]

    @property
    def as_stored(self) -> bool:
        """Whether it can be filled in pieces, from one stored tensor."""
        return self.layout == PLAIN and len(self.sources) == 1

    @property
    def piece_bytes(self) -> int:
        """Of what is filled at once."""
        return PIECE_BYTES if self.as_stored else self.n_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """The unit in which weights come and go. `n_bytes`: packed, a multiple of 64."""

    name: str
    n_bytes: int
    tensors: tuple[PackedTensor, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start .. start + n_bytes` of one tensor, which go to `address`."""

    tensor: PackedTensor
    start: int
    n_bytes: int
    address: int


Fill = Callable[[Piece], bytes]
"""Write the piece's bytes at its address; a digest of them."""


Origin = Callable[[Segment], str | None]
"""What a segment's bytes would be made of: equal only where these are. None: it is not known."""


class SealedSegment:
    """The memory of one segment, which any number of models hold. One memfd, mapped read only."""

    def __init__(self, fd: int, n_bytes: int, digest: str) -> None:
        """Takes `fd` over. Raises DeviceError where it is no sealed file of this size, OSError
        where it cannot be mapped; it is closed then."""
        self.holds = 0
        self.n_bytes = n_bytes
        self.digest = digest
        self.fd = fd
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(fd).st_size != n_bytes:
                raise DeviceError("host tier", "another process's segment is none")
            shared = syscalls.MAP_SHARED | syscalls.MAP_POPULATE
            self.address = syscalls.mmap(0, n_bytes, syscalls.PROT_READ, shared, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def filled(cls, model: str, segment: Segment, fill: Fill, threads: int) -> SealedSegment:
        """Allocate, call `fill` for every piece from several threads, seal."""
        n_bytes = whole_pages(segment)
        _check_available(model, segment.name, n_bytes)
        try:
            fd = os.memfd_create(f"ballast-{model}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, n_bytes)
                digest = _filled(fd, n_bytes, segment, fill, threads)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(fd)
                raise
            return cls(fd, n_bytes, digest)
        except OSError as error:
            raise _no_memory(model, n_bytes, error) from error

    def close(self) -> None:
        """Give the memory back, unless another process has it too."""
        syscalls.munmap(self.address, self.n_bytes)
        os.close(self.fd)


def _filled(fd: int, n_bytes: int, segment: Segment, fill: Fill, threads: int) -> str:
    """Fill everything; hex SHA-256 over the layout (but for names) and the pieces' digests."""
    write = syscalls.PROT_READ | syscalls.PROT_WRITE
    base = syscalls.mmap(0, n_bytes, write, syscalls.MAP_SHARED, fd)

    def work(piece: Piece) -> bytes:
        # Memory that is missing shows here, as an error, and not as a signal when written.
        page = std_mmap.PAGESIZE
        first = (piece.address - base) // page * page
        end = ceil_div(piece.address - base + piece.n_bytes, page) * page
        syscalls.fallocate(fd, 0, first, end - first)
        return fill(piece)

    layout = [(t.shape, t.dtype, t.layout, t.offset, t.n_bytes) for t in segment.tensors]
    total = hashlib.sha256(repr((segment.n_bytes, layout)).encode())
    pool = ThreadPoolExecutor(threads, "fill")
    try:
        pieces = [
            Piece(t, start, min(t.piece_bytes, t.n_bytes - start), base + t.offset + start)
            for t in segment.tensors
            for start in range(0, t.n_bytes, t.piece_bytes)
        ]
        for digest in pool.map(work, pieces):
            total.update(digest)
        return total.hexdigest()
    finally:
        # No thread may write once the mapping is gone.
        pool.shutdown(wait=True, cancel_futures=True)
        syscalls.munmap(base, n_bytes)


class Exchange(Protocol):
    """What other processes of this host hold; `ballast.cluster.segments.SegmentClient` asks."""

    def find(self, origin: str) -> tuple[str, int] | None:
        """The digest of a segment that was made of this, and a descriptor, to be the caller's, if
        another process holds it: this one does, too, from now on."""

    def share(self, digest: str, fd: int, origin: str | None) -> int | None:
        """Let others map the segment in `fd`, made of `origin` if that is known; a descriptor of an
        equal one that one of them has already, to be the caller's, if there is one."""

    def release(self, digest: str) -> None:
        """This process does not hold the segment any more."""


class HostTier:
    """Segments in host memory, equal ones once however many models hold them, and processes.

    Used by one thread at a time.
    """

    def __init__(
        self, progress: Callable[[], object] = lambda: None, exchange: Exchange | None = None
    ) -> None:
        """`progress` is called for each piece that was filled, by any thread; `exchange` is told of
        what is held, and of nothing else."""
        _allow_files()
        self._progress = progress
        self._exchange = exchange
        self._segments: dict[str, SealedSegment] = {}
        """By digest."""
        self._origins: dict[str, SealedSegment] = {}
        """By what they are made of."""
        self.closing = False
        """What is being filled fails; set by any thread."""

    @property
    def n_bytes(self) -> int:
        """Memory of all segments, in whole pages of the operating system."""
        return sum(s.n_bytes for s in self._segments.values())

    def hold(
        self,
        model: str,
        segment: Segment,
        fill: Fill,
        threads: int,
        origin: Origin = lambda segment: None,
    ) -> SealedSegment:
        """The memory of a segment: one that was made of the same, here or in another process, or
        it is filled; and where an equal one is there already, that one in its stead.

        `origin` is asked again after filling: what changed meanwhile is not known to be anything.
        """
        made_of = origin(segment)
        found = None if made_of is None else self._made_of(made_of, whole_pages(segment))
        if found is None:
            sealed = self._fill(model, segment, fill, threads)
            if origin(segment) != made_of:
                made_of = None
            found = self._segments.get(sealed.digest)
            if found is None:
                found = self._shared(sealed, made_of)
            else:
                sealed.close()
        if made_of is not None:
            self._origins[made_of] = found
        found.holds += 1
        return found

    def release(self, sealed: SealedSegment) -> None:
        """One hold less; the last gives the memory back."""
        sealed.holds -= 1
        if not sealed.holds:
            del self._segments[sealed.digest]
            self._origins = {o: s for o, s in self._origins.items() if s is not sealed}
            sealed.close()
            if self._exchange is not None:
                self._exchange.release(sealed.digest)

    def _made_of(self, origin: str, n_bytes: int) -> SealedSegment | None:
        found = self._origins.get(origin)
        theirs = None
        if found is None and self._exchange is not None:
            theirs = self._exchange.find(origin)
        if theirs is None:
            return found
        digest, fd = theirs
        if digest in self._segments:
            os.close(fd)
            return self._segments[digest]
        found = self._segments[digest] = self._theirs(fd, n_bytes, digest)
        self._progress()
        return found

    def _fill(self, model: str, segment: Segment, fill: Fill, threads: int) -> SealedSegment:
        def fill_unless_closing(piece: Piece) -> bytes:
            if self.closing:
                raise DeviceError("host tier", "it is closing")
            digest = fill(piece)
            self._progress()
            return digest

        return SealedSegment.filled(model, segment, fill_unless_closing, threads)

    def _shared(self, filled: SealedSegment, origin: str | None) -> SealedSegment:
        """What was filled, or what another process has that is equal."""
        found = filled
        if self._exchange is not None:
            theirs = self._exchange.share(filled.digest, filled.fd, origin)
            if theirs is not None:
                filled.close()
                found = self._theirs(theirs, filled.n_bytes, filled.digest)
        self._segments[filled.digest] = found
        return found

    def _theirs(self, fd: int, n_bytes: int, digest: str) -> SealedSegment:
        """Raises DeviceError for what is no segment, and nothing is held then."""
        assert self._exchange is not None
        try:
            return SealedSegment(fd, n_bytes, digest)
        except BaseException as error:
            self._exchange.release(digest)
            if isinstance(error, OSError):
                raise _no_memory("a model", n_bytes, error) from error
            raise


class HostBytes:
    """One model's hold on its segments in the host tier."""

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        fill: Fill,
        threads: int,
        tier: HostTier,
        origin: Origin = lambda segment: None,
    ) -> None:
        """Bring all segments into `tier`, one after the other, so that of a model whose segments
        are there already no more than one is ever in memory twice.

        Raises DeviceError where the memory is not to be had, and whatever `fill` raises; nothing
        stays behind then.
        """
        self._tier = tier
        self._held: list[SealedSegment] = []
        try:
            for segment in segments:
                self._held.append(tier.hold(name, segment, fill, threads, origin))
        except BaseException:
            self.close()
            raise
        self.digests = tuple(s.digest for s in self._held)
        """Of each segment, hex."""
        self.digest = hashlib.sha256("".join(self.digests).encode()).digest()
        """Of all of them in order."""

    def addresses(self) -> tuple[int, ...]:
        """Where each segment begins."""
        if not self._held:
            raise DeviceError("host tier", "it is closed")
        return tuple(s.address for s in self._held)

    def files(self) -> tuple[int, ...]:
        """The sealed memfd of each segment, for another process to map; they stay the tier's."""
        return tuple(s.fd for s in self._held)

    def close(self) -> None:
        """Let go of them; a second call does nothing. No view of them may be used after."""
        for sealed in self._held:
            self._tier.release(sealed)
        self._held = []


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to a linear module: y += scale * (x A^T) B^T."""

    module: str
    """Path in the base."""
    inputs: int
    outputs: int
    rank: int
    scale: float
    a: PackedTensor
    """(rank, inputs)"""
    b: PackedTensor
    """B transposed: (rank, outputs)."""


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter in the host tier: one segment."""

    spec: AdapterSpec
    deltas: tuple[Delta, ...]
    """In the base's order of modules."""
    segment: Segment
    memory: HostBytes


@dataclass(slots=True, eq=False)
class HostModel:
    """A model in the host tier, and its adapters.

    `config` is the transformers configuration its module is built from; `segments` tell where in
    the memory at `addresses` each tensor of the model is; the addresses of the adapters' segments
    follow. `windows`: how many positions each layer's attention sees. `fused`: the segments are
    laid out for `models/fused.py`.
    """

    spec: ModelSpec
    config: Any
    directory: Path
    segments: tuple[Segment, ...]
    memory: HostBytes
    windows: tuple[int | None, ...]
    fused: bool
    shard: Shard = WHOLE
    """What part of the model this is."""
    adapters: tuple[HostAdapter, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Adapters that are not served, with the reason."""
    addresses: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        own = self.memory.addresses()
        self.addresses = own + tuple(x for a in self.adapters for x in a.memory.addresses())

    def close(self) -> None:
        """Give back what no other model holds. No copy from it may be on its way."""
        for adapter in self.adapters:
            adapter.memory.close()
        self.memory.close()


def pack(name: str, tensors: Sequence[PackedTensor]) -> Segment:
    """Lay tensors out one after the other, whatever their `offset` was."""
    packed, at = [], 0
    for tensor in tensors:
        packed.append(replace(tensor, offset=at))
        at = _up(at + tensor.n_bytes, TENSOR_ALIGNMENT)
    return Segment(name, at, tuple(packed))


def _allow_files() -> None:
    """As many open files as the system allows: a tier has one per segment, and 1024 is common."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def whole_pages(segment: Segment) -> int:
    """Bytes of its memory, in whole pages of the operating system."""
    return _up(max(segment.n_bytes, 1), std_mmap.PAGESIZE)


def _up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


def _check_available(model: str, segment: str, n_bytes: int) -> None:
    """Refuse what the kernel would answer by killing a process."""
    available = _available()
    if available is not None and n_bytes > available:
        raise DeviceError(
            "host tier",
            f"{segment} of {model} takes {format_bytes(n_bytes)} of host memory, "
            f"{format_bytes(available)} are available; free some, or serve fewer models",
        )


def _available() -> int | None:
    """Bytes that can still be had, by the kernel's estimate and the control group's limit."""
    found: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found)) if found else None


def _no_memory(name: str, n_bytes: int, error: OSError) -> DeviceError:
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EAGAIN):
        return DeviceError(
            "host tier",
            f"no host memory for another {format_bytes(n_bytes)} of {name}'s weights "
            f"({error.strerror}); free some, or serve fewer models",
        )
    return DeviceError("host tier", f"{name}: {error}")
