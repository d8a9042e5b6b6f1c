"""Hold models' weights in host memory (the host tier): packed, sealed and read only.

::

    model a   [embeddings 1f..]  [layer 0 a3..]  [layer 1 77..]  [head e0..]
    model b   [embeddings 1f..]  [layer 0 5b..]  ...
               ^ equal layout and bytes: one memfd, held by both

One memfd per distinct segment: it is filled by several threads, then sealed against writing and any
change of size, and mapped read only. So its mappings cannot fault, whatever happens to the user's
own files, and other processes can map it (docs/decisions/006). Tensors begin at multiples of 64
bytes within their segment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ballast.core.errors import DeviceError
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.isolation.calls import Here, Isolation
from ballast.weights.decoder_recipe import DecoderRecipe, RotarySet
from ballast.weights.sealed import SEALS, SealedSegment, no_memory
from ballast.weights.segment import Fill, Origin, PackedTensor, Piece, Segment, whole_pages
from ballast.weights.segment_exchange import SegmentExchange
from ballast.weights.sharding import WHOLE, Shard


class HostTier:
    """Segments in host memory: equal ones are kept once for all models and processes that hold
    them.

    Used by one thread at a time.
    """

    def __init__(
        self,
        progress: Callable[[], object] = lambda: None,
        exchange: SegmentExchange | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        """`progress`: called for each piece that was filled, by any thread; `exchange`: shares the
        segments with other processes; `isolation`: where configurations and headers of checkpoints
        are read, by default in this process."""
        _allow_files()
        self._progress = progress
        self._exchange = exchange
        self.isolation: Isolation = isolation or Here()
        self._segments: dict[str, SealedSegment] = {}
        """Segments held, by digest."""
        self._origins: dict[str, SealedSegment] = {}
        """Segments held, by origin."""
        self.closing = False
        """Whether fills in progress are to fail; set by any thread."""
        self._writable: bool | None = None
        """None: not determined yet."""

    @property
    def writable(self) -> bool:
        """Whether segments are sealed against a change of size only, and not against writing.

        Most GPUs cannot page-lock a file that is sealed against writing. Segments are mapped read
        only all the same. Processes that exchange segments agree on it, as any of them may fill a
        segment that another page-locks.
        """
        if self._writable is None:
            self._writable = self._exchange is not None and self._exchange.writable
        return self._writable

    def make_writable(self, writable: bool) -> None:
        """Set `writable` to what this device needs; no effect if segments are exchanged with other
        processes."""
        if self._exchange is None:
            self._writable = writable

    @property
    def n_bytes(self) -> int:
        """Bytes of all segments, in whole pages of the operating system."""
        return sum(s.n_bytes for s in self._segments.values())

    def hold(
        self,
        model: str,
        segment: Segment,
        fill: Fill,
        threads: int,
        origin: Origin = lambda segment: None,
    ) -> SealedSegment:
        """Return the memory of a segment: one of the same origin, here or in another process, or
        else a new one that is filled; if an equal one exists already, that one instead.

        `origin` is called again after filling: if the files changed meanwhile, the origin is
        unknown.
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

    def hold_again(self, digest: str, n_bytes: int) -> SealedSegment | None:
        """Return the memory of a segment that some process of this host holds, or has held for a
        model that is kept; None: there is none."""
        found = self._segments.get(digest)
        if found is None:
            fd = None if self._exchange is None else self._exchange.map(digest)
            if fd is None:
                return None
            found = self._segments[digest] = self._theirs(fd, n_bytes, digest)
            self._progress()
        found.holds += 1
        return found

    def knows(self, model: str) -> bool:
        """Return whether a model of this name is kept on this host, in whatever layout."""
        return self._exchange is not None and self._exchange.knows_model(model)

    def bring(self, model: str, kind: str, listing: str) -> bool:
        """Have a model of this kind brought from another host that keeps it, unless the files here
        (`source_files.listing`) are those that it was loaded from; returns whether it is here."""
        return self._exchange is not None and self._exchange.bring_model(model, kind, listing)

    def recall(self, model: str, kind: str) -> bytes | None:
        """Return the record of a model of this kind that is kept on this host; None: there is
        none."""
        fd = None if self._exchange is None else self._exchange.find_model(model, kind)
        if fd is None:
            return None
        with open(fd, "rb") as file:
            return os.pread(fd, os.fstat(file.fileno()).st_size, 0)

    def keep(self, model: str, kind: str, files: str, record: bytes) -> bool:
        """Have a model kept on this host beyond the life of this process, with a record of it.

        Returns False if another process has loaded it from other files.
        """
        if self._exchange is None:
            return True
        fd = os.memfd_create("ballast record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(fd, "wb") as file:
            file.write(record)
            file.flush()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return self._exchange.keep_model(model, kind, files, fd)

    def forget(self, model: str) -> None:
        """Have a model that this process serves no longer kept for no other."""
        if self._exchange is not None:
            self._exchange.forget_model(model)

    def release(self, sealed: SealedSegment) -> None:
        """Remove one hold; the last one frees the memory."""
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

        return SealedSegment.filled(model, segment, fill_unless_closing, threads, self.writable)

    def _shared(self, filled: SealedSegment, origin: str | None) -> SealedSegment:
        """Return the segment that was filled, or an equal one of another process."""
        found = filled
        if self._exchange is not None:
            theirs = self._exchange.share(filled.digest, filled.fd, origin)
            if theirs is not None:
                filled.close()
                found = self._theirs(theirs, filled.n_bytes, filled.digest)
        self._segments[filled.digest] = found
        return found

    def _theirs(self, fd: int, n_bytes: int, digest: str) -> SealedSegment:
        """Map another process's segment. Raises DeviceError if it is none, and nothing is held
        then."""
        assert self._exchange is not None
        try:
            return SealedSegment(fd, n_bytes, digest)
        except BaseException as error:
            self._exchange.release(digest)
            if isinstance(error, OSError):
                raise no_memory("a model", n_bytes, error) from error
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
        are there already at most one is in memory twice.

        Raises DeviceError if there is not enough memory, and whatever `fill` raises; nothing stays
        behind then.
        """
        self._tier = tier
        self._held: list[SealedSegment] = []
        try:
            for segment in segments:
                self._held.append(tier.hold(name, segment, fill, threads, origin))
        except BaseException:
            self.close()
            raise
        self._note_digests()

    @classmethod
    def again(
        cls, segments: Sequence[Segment], digests: Sequence[str], tier: HostTier
    ) -> HostBytes | None:
        """Hold segments that are in host memory already, by their digests; None if one is not."""
        made = cls.__new__(cls)
        made._tier, made._held = tier, []
        for segment, digest in zip(segments, digests, strict=True):
            found = tier.hold_again(digest, whole_pages(segment))
            if found is None:
                made.close()
                return None
            made._held.append(found)
        made._note_digests()
        return made

    def _note_digests(self) -> None:
        self.digests = tuple(s.digest for s in self._held)
        """Digest of each segment, hex."""
        self.digest = hashlib.sha256("".join(self.digests).encode()).digest()
        """Digest of all segments in order."""

    def addresses(self) -> tuple[int, ...]:
        """Return the address of each segment."""
        if not self._held:
            raise DeviceError("host tier", "it is closed")
        return tuple(s.address for s in self._held)

    def files(self) -> tuple[int, ...]:
        """Return the sealed memfd of each segment, for another process to map; the tier keeps
        owning them."""
        return tuple(s.fd for s in self._held)

    def close(self) -> None:
        """Release the segments; a second call does nothing. No view of them may be used after."""
        for sealed in self._held:
            self._tier.release(sealed)
        self._held = []


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """An adapter's change of a linear module: y += scale * (x A^T) B^T."""

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


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """An adapter's change of a linear module by a whole matrix in few bits: y += x W^T."""

    module: str
    """Path in the base."""
    weight: PackedTensor
    """(outputs, inputs), in quantised panels."""


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter in the host tier: one segment."""

    spec: AdapterSpec
    deltas: tuple[LoraDelta, ...]
    """In the base's order of modules."""
    segment: Segment
    memory: HostBytes
    packed: tuple[PackedDelta, ...] = ()
    """Modules that it changes otherwise than by `deltas`."""


@dataclass(slots=True, eq=False)
class HostModel:
    """A model in the host tier, and its adapters.

    `make_config`: makes the transformers configuration that its module is built from. `segments`:
    where, in the memory at `addresses`, each tensor of the model is; the addresses of the adapters'
    segments follow. `windows`: attention window of each layer. `fused`: the segments are laid out
    for `models/fused/model.py`, which computes by `recipe`.
    """

    spec: ModelSpec
    make_config: Callable[[], Any]
    directory: Path
    segments: tuple[Segment, ...]
    memory: HostBytes
    windows: tuple[int | None, ...]
    fused: bool
    recipe: DecoderRecipe | None = None
    rotary: Mapping[str, RotarySet] = field(default_factory=dict)
    """Rotary embeddings by set, in the recipe's order; empty unless `fused`."""
    norm_epsilon: float | None = None
    """Of the norms; None unless `fused`."""
    shard: Shard = WHOLE
    """The rank's part of the model."""
    tokenizer: str = ""
    """Digest of the tokenizer's files when it was loaded; empty: unknown."""
    adapters: tuple[HostAdapter, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Adapters that are not served, with the reason."""
    addresses: tuple[int, ...] = field(init=False)

    @property
    def config(self) -> Any:
        """The configuration. Made anew each time: `transformers` is imported for it."""
        return self.make_config()

    def __post_init__(self) -> None:
        own = self.memory.addresses()
        self.addresses = own + tuple(x for a in self.adapters for x in a.memory.addresses())

    def close(self) -> None:
        """Free the segments that no other model holds. No copy from them may be in flight."""
        for adapter in self.adapters:
            adapter.memory.close()
        self.memory.close()


def _allow_files() -> None:
    """Raise the limit of open files to what the system allows: a tier has one per segment, and 1024
    is common."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
