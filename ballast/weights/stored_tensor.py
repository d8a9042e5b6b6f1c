"""A tensor stored in a file: its name, dtype and shape, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ballast.core.errors import CheckpointError

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes of one element by the format's name of its dtype."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file. `dtype` is the format's name for it; `start` counts from byte 0."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int
    heads: int = 0
    """If above 0: the rows of each of so many heads are stored in the order of GGUF files."""

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(str(self.path), self.name, reason)
