"""Keep the models that workers have loaded beyond the lives of these workers.

::

    worker 1 ── record of model a ──> kept: a, by worker 1
    worker 1 dies                     kept: a, by nobody, for the one that takes its place
    worker 2 ── a? ─────────────────> kept: a, by worker 2, which serves the same weights
    worker 2 ── a is removed ───────> not kept any more: its segments are freed

Used by `SegmentBroker`, which keeps the segments that the records name. Records are read by workers
alone (`ballast.weights.sealed_model`), but for digests and layouts of their segments.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from ballast.weights.segment import Segment


class _Record(msgspec.Struct):
    """The part of a record (`SealedModel`) that names segments."""

    digests: tuple[str, ...]


class _Loaded(_Record):
    """The same, and the digest of the tokenizer's files."""

    tokenizer: str = ""


class _Manifest(msgspec.Struct):
    segments: tuple[Segment, ...]


class _Adapter(msgspec.Struct):
    segment: Segment


class SealedLayout(_Record):
    """The part of a record that is about segments and files: what passes a model on, and does not
    serve it, needs to know."""

    files: str
    listing: str
    manifest: _Manifest
    adapters: tuple[_Adapter, ...]

    @classmethod
    def decode(cls, record: bytes) -> SealedLayout:
        """Raises MsgspecError for what is no record."""
        return msgspec.msgpack.decode(record, type=cls)

    def segments(self) -> dict[str, Segment]:
        """Return distinct segments by digest, the adapters' last; empty: a shard's, which cannot
        be found again. Raises ValueError."""
        if not self.digests:
            return {}
        found = (*self.manifest.segments, *(adapter.segment for adapter in self.adapters))
        return dict(zip(self.digests, found, strict=True))


@dataclass(slots=True)
class KeptModel:
    """A model of one kind: one that is laid out in one way."""

    record: int
    """Descriptor of the record."""
    files: str
    """Identity of the files that it was loaded from."""
    digests: frozenset[str]
    tokenizer: str
    """Digest of its tokenizer's files when it was loaded."""
    keepers: set[socket.socket] = field(default_factory=set)
    orphaned: int = 0
    """Number of keepers that have died, and whose places nobody has taken."""
    handed: bool = False
    """Whether the server before this one has loaded it, and no worker has taken it yet."""

    @classmethod
    def read(cls, record: int, files: str, handed: bool = False) -> KeptModel:
        """Read a record, and take it over. Raises ValueError for what is none."""
        content = os.pread(record, os.fstat(record).st_size, 0)
        found = msgspec.msgpack.decode(content, type=_Loaded)
        digests = frozenset(found.digests)
        return cls(record, files, digests, found.tokenizer, handed=handed)


class KeptModels:
    """Models by a digest of their names, and by kind."""

    def __init__(self, changed: Callable[[str, str, bool], object]) -> None:
        """`changed`: called with model and kind, and whether it is kept now."""
        self._models: dict[str, dict[str, KeptModel]] = {}
        self._changed = changed

    def __len__(self) -> int:
        return sum(map(len, self._models.values()))

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def __iter__(self) -> Iterator[KeptModel]:
        return (kept for _, _, kept in self.items())

    def get(self, model: str, kind: str) -> KeptModel | None:
        return self._models.get(model, {}).get(kind)

    def holds(self, digest: str) -> bool:
        """Return whether a segment belongs to a model that is kept."""
        return any(digest in kept.digests for kept in self)

    def find(self, model: str, kind: str, keeper: socket.socket) -> KeptModel | None:
        """Return a model, which this keeper keeps from now on; None: it is not kept."""
        kept = self.get(model, kind)
        if kept is not None:
            self._add_keeper(kept, keeper)
        return kept

    def keep(
        self, model: str, kind: str, files: str, record: int, keeper: socket.socket | None
    ) -> bool:
        """Keep a model by its record, which this takes over; False: it has been loaded from other
        files. `keeper`: None: it waits for one. Raises ValueError for what is no record."""
        kinds = self._models.get(model, {})
        if any(kept.files != files for kept in kinds.values()):
            os.close(record)
            return False
        if kind not in kinds:
            self._models[model] = {**kinds, kind: KeptModel.read(record, files)}
            self._models[model][kind].orphaned = int(keeper is None)
            self._changed(model, kind, True)
        else:
            os.close(record)
        if keeper is not None:
            self._add_keeper(self._models[model][kind], keeper)
        return True

    def adopt(self, model: str, kind: str, kept: KeptModel) -> None:
        """Keep a model that the server before this one has loaded."""
        self._models.setdefault(model, {})[kind] = kept
        self._changed(model, kind, True)

    def drop_handed(self) -> None:
        """Keep no longer what was adopted, and what no worker has taken."""
        for kept in self:
            kept.handed = False
        for model in list(self._models):
            self._drop(model)

    def items(self) -> Iterator[tuple[str, str, KeptModel]]:
        """Return all models with the digests of their names, and their kinds."""
        return ((m, kind, k) for m, kinds in self._models.items() for kind, k in kinds.items())

    def release(self, model: str, keeper: socket.socket) -> None:
        """Note that a keeper serves a model no longer."""
        for kept in self._models.get(model, {}).values():
            kept.keepers.discard(keeper)
        self._drop(model)

    def forget(self, model: str) -> None:
        """Keep a model no longer for keepers that have died."""
        for kept in self._models.get(model, {}).values():
            kept.orphaned = 0
        self._drop(model)

    def bereave(self, keeper: socket.socket) -> None:
        """Note that a keeper has died: what it kept waits for the one that takes its place."""
        for kept in self:
            if keeper in kept.keepers:
                kept.keepers.discard(keeper)
                kept.orphaned += 1

    @staticmethod
    def _add_keeper(kept: KeptModel, keeper: socket.socket) -> None:
        if keeper not in kept.keepers:
            kept.keepers.add(keeper)
            kept.orphaned = max(0, kept.orphaned - 1)
            kept.handed = False

    def _drop(self, model: str) -> None:
        kinds = self._models.get(model, {})
        for kind, kept in list(kinds.items()):
            if not (kept.keepers or kept.orphaned or kept.handed):
                os.close(kept.record)
                del kinds[kind]
                self._changed(model, kind, False)
        if not kinds:
            self._models.pop(model, None)
