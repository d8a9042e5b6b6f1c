"""Keep the models that workers have loaded beyond the lives of these workers.

::

    worker 1 ── record of model a ──> kept: a, by worker 1
    worker 1 dies                     kept: a, by nobody, for the one that takes its place
    worker 2 ── a? ─────────────────> kept: a, by worker 2, which serves the same weights
    worker 2 ── a is removed ───────> not kept any more: its segments are freed

Used by `SegmentBroker`, which keeps the segments that the records name. Records are read by workers
alone (`ballast.weights.sealed_model`), but for the digests of their segments.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec


class _Record(msgspec.Struct):
    """The part of a record that names segments."""

    digests: tuple[str, ...]


@dataclass(slots=True)
class KeptModel:
    """A model of one kind: one that is laid out in one way."""

    record: int
    """Descriptor of the record."""
    files: str
    """Identity of the files that it was loaded from."""
    digests: frozenset[str]
    keepers: set[socket.socket] = field(default_factory=set)
    orphaned: int = 0
    """Number of keepers that have died, and whose places nobody has taken."""


class KeptModels:
    """Models by a digest of their names, and by kind."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, KeptModel]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._models.values()))

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def __iter__(self) -> Iterator[KeptModel]:
        return (kept for kinds in self._models.values() for kept in kinds.values())

    def holds(self, digest: str) -> bool:
        """Return whether a segment belongs to a model that is kept."""
        return any(digest in kept.digests for kept in self)

    def find(self, model: str, kind: str, keeper: socket.socket) -> KeptModel | None:
        """Return a model, which this keeper keeps from now on; None: it is not kept."""
        kept = self._models.get(model, {}).get(kind)
        if kept is not None:
            self._add_keeper(kept, keeper)
        return kept

    def keep(self, model: str, kind: str, files: str, record: int, keeper: socket.socket) -> bool:
        """Keep a model by its record, which this takes over; False: it has been loaded from other
        files. Raises ValueError for what is no record."""
        kinds = self._models.get(model, {})
        if any(kept.files != files for kept in kinds.values()):
            os.close(record)
            return False
        if kind not in kinds:
            content = os.pread(record, os.fstat(record).st_size, 0)
            digests = msgspec.msgpack.decode(content, type=_Record).digests
            self._models[model] = {**kinds, kind: KeptModel(record, files, frozenset(digests))}
        else:
            os.close(record)
        self._add_keeper(self._models[model][kind], keeper)
        return True

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

    def _drop(self, model: str) -> None:
        kinds = self._models.get(model, {})
        for kind, kept in list(kinds.items()):
            if not kept.keepers and not kept.orphaned:
                os.close(kept.record)
                del kinds[kind]
        if not kinds:
            self._models.pop(model, None)
