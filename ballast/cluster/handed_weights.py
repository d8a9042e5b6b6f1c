"""The host tier's weights on their way from a server to the one that takes its place.

A server that restarts replaces its program by a new one in the same process (`server.restart`):
descriptors stay open, and sealed segments with them. What the new server keeps of them is decided
by `SegmentBroker.adopt`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable

import msgspec

from ballast.weights.sealed import SEALS


class HandedModel(msgspec.Struct, frozen=True):
    """A model that is kept, by its record."""

    name: str
    """Digest of its name."""
    kind: str
    files: str
    """Identity of the files that it was loaded from."""
    record: int
    """Descriptor."""


class HandedWeights(msgspec.Struct, frozen=True):
    """Models, and their segments' descriptors by digest."""

    models: list[HandedModel] = []
    segments: dict[str, int] = {}

    @property
    def descriptors(self) -> Iterable[int]:
        return (*self.segments.values(), *(model.record for model in self.models))

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


def is_sealed(fd: int) -> bool:
    """Return whether nobody can change a file any more, in bytes or in size."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False
