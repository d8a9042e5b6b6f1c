"""A tensor stored in a file: its name, dtype and shape, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    parts: tuple[tuple[str, StoredTensor], ...]
    """The tensors by their role."""
    bits: int = 8
    scale_rows: int = 1
    """Outputs that share a scale."""
    numbers: tuple[float, ...] = ()
    """What else the format needs to know."""

    def part(self, role: str) -> StoredTensor | None:
        return next((stored for name, stored in self.parts if name == role), None)


@dataclass(frozen=True, slots=True)
class StoredTensor:
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
    """Whether its matrices (the last two dimensions) are stored transposed."""
    packing: Packing | None = None
    """How the matrix is made of other tensors; `path`, `start` and `n_bytes` are its codes'."""

    @property
    def is_quantised(self) -> bool:
        """Whether elements are quantised."""
        return self.packing is not None or self.dtype.startswith(BLOCK_PREFIX)

    @property
    def files(self) -> tuple[StoredTensor, ...]:
        """The tensors in files that it is read from."""
        if self.packing is None:
            return (self,)
        return tuple(part for _, part in self.packing.parts)

    @property
    def matrices(self) -> tuple[StoredTensor, ...]:
        """The quantised matrices that the tensor consists of (experts), one by one; the tensor
        itself where it is no such stack."""
        packing = self.packing
        if packing is None or len(self.shape) == 2:
            return (self,)
        each = range(self.shape[0])
        parts = [(role, [_part_of(stored, i) for i in each]) for role, stored in packing.parts]
        return tuple(
            replace(
                _part_of(self, i),
                name=f"{self.name}[{i}]",
                packing=replace(packing, parts=tuple((role, of[i]) for role, of in parts)),
            )
            for i in each
        )

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(str(self.path), self.name, reason)


def _part_of(stored: StoredTensor, i: int) -> StoredTensor:
    """Return part i of a tensor along its first dimension."""
    n_bytes = stored.n_bytes // stored.shape[0]
    start = stored.start + i * n_bytes
    return replace(stored, shape=stored.shape[1:], start=start, n_bytes=n_bytes)
