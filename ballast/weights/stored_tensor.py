"""A tensor stored in a file: its name, dtype and shape, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ballast.core.errors import CheckpointError
from ballast.fleet.gguf_header import BLOCK_PREFIX

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
class Packing:
    """How a quantised matrix is made of several tensors of a checkpoint."""

    format: str
    """One of `ballast.weights.quantisation.config`'s."""
    form: str
    """Name of the panel form that holds its bits. Where its span is not whole blocks, the matrix is
    dequantised."""
    parts: tuple[tuple[str, Stored], ...]
    """The tensors by their role."""
    bits: int = 8
    scale_rows: int = 1
    """Outputs that share a scale."""
    numbers: tuple[float, ...] = ()
    """What else the format needs to know."""

    def part(self, role: str) -> Stored | None:
        return next((stored for name, stored in self.parts if name == role), None)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file, or a matrix of several. `dtype` is the format's name for it; `start`
    counts from byte 0."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int
    heads: int = 0
    """If above 0: the rows of each of so many heads are stored in the order of GGUF files."""
    transposed: bool = False
    """Whether its matrices, of the last two dimensions, are stored the other way round."""
    packing: Packing | None = None
    """How the matrix is made of other tensors; `path`, `start` and `n_bytes` are its codes'."""

    @property
    def is_quantised(self) -> bool:
        """Whether elements are quantised."""
        return self.packing is not None or self.dtype.startswith(BLOCK_PREFIX)

    @property
    def files(self) -> tuple[Stored, ...]:
        """The tensors in files that it is read from."""
        if self.packing is None:
            return (self,)
        return tuple(part for _, part in self.packing.parts)

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(str(self.path), self.name, reason)
