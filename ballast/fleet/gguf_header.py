"""Parse the header of a GGUF file: its values, and where its tensors are.

The file may be anybody's: each count, length and offset is compared with the file's size before it
is used, so that parsing takes time and memory in proportion to the header alone.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ballast.core.errors import CheckpointError
from ballast.core.units import MiB, format_bytes
from ballast.fleet.unfinished_download import is_lfs_pointer

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER = 256 * MiB
"""Most bytes of a header; the largest vocabularies have some 10 MiB."""
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Format of `struct` by the number of a value's type."""


class TensorType(NamedTuple):
    """How elements are stored: in blocks of `elements` that take `n_bytes`."""

    name: str
    elements: int
    n_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    30: TensorType("BF16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
}
"""Types of tensors that are read, by their numbers in the format."""

BLOCK_PREFIX = "GGUF "
"""Of a stored tensor's dtype, if it is in blocks: ``GGUF Q4_K``."""
_UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Names of other types, for refusals."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` is row-major, the reverse of the file's; `start` counts from byte 0."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Values by key, and tensors by name."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """Parse a file's header. Raises CheckpointError with what is wrong, and OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if is_lfs_pointer(path):
            why = "it is a pointer of Git LFS, which `git lfs pull` replaces by the file"
            raise CheckpointError(str(path), None, f"an unfinished download: {why}")
        if size < 24 or file.read(4) != MAGIC:
            raise CheckpointError(str(path), None, "not a GGUF file, or an unfinished download")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            return _Parser(path, mapped, size).header()


class _Parser:
    """Reads one file from front to back; no read is beyond `end`."""

    def __init__(self, path: Path, mapped: mmap.mmap, size: int) -> None:
        self._path, self._mapped, self._size = path, mapped, size
        self._end = min(size, _MOST_HEADER)
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._scalar("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise self._error(f"its version is {version}; versions {known} are read")
        n_tensors, n_values = self._count(24), self._count(12)
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._string()
            if key in values:
                raise self._error(f"corrupt header: key {key!r:.80} twice")
            values[key] = self._value(self._scalar("I"))
        entries = [self._tensor() for _ in range(n_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment % 8:
            raise self._error(f"corrupt header: general.alignment is {alignment!r:.40}")
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise self._error("twice in its header", name)
            tensors[name] = self._placed(name, kind, shape, data, offset, alignment)
        return GgufHeader(self._path, values, tensors)

    def _error(self, reason: str, tensor: str | None = None) -> CheckpointError:
        name = None if tensor is None else f"{tensor:.100}"
        return CheckpointError(str(self._path), name, reason)

    def _take(self, n: int) -> int:
        """Return the place of the next `n` bytes, and pass them."""
        at = self._at
        if n > self._end - at:
            if self._end < self._size:
                raise self._error(f"its header is larger than {format_bytes(_MOST_HEADER)}")
            raise self._error(f"truncated or corrupt: {n} bytes of its header at byte {at} are not")
        self._at += n
        return at

    def _scalar(self, form: str) -> Any:
        at = self._take(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._mapped, at)[0]

    def _count(self, least: int) -> int:
        """Read how many things follow, of which each has `least` bytes or more."""
        n = int(self._scalar("Q"))
        if n * least > self._end - self._at:
            raise self._error(f"truncated or corrupt: its header says that {n} things follow")
        return n

    def _string(self) -> str:
        n = self._count(1)
        at = self._take(n)
        try:
            return self._mapped[at : at + n].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"corrupt header: a text at byte {at} is not UTF-8") from error

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._error(f"corrupt header: a value of unknown type {kind}")
        inner = self._scalar("I")
        if inner == _STRING:
            return [self._string() for _ in range(self._count(8))]
        if inner not in _SCALARS:
            raise self._error(f"a list of values of type {inner} is not read")
        form = _SCALARS[inner]
        n = self._count(struct.calcsize(f"<{form}"))
        at = self._take(n * struct.calcsize(f"<{form}"))
        return list(struct.unpack_from(f"<{n}{form}", self._mapped, at))

    def _tensor(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        """Read one tensor's entry: name, type, shape and offset."""
        name = self._string()
        n = self._scalar("I")
        if not 1 <= n <= _MOST_DIMENSIONS:
            raise self._error(f"corrupt header: it has {n} dimensions", name)
        shape = tuple(int(self._scalar("Q")) for _ in range(n))[::-1]
        number = self._scalar("I")
        offset = int(self._scalar("Q"))
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            kind = _UNREAD.get(number, f"number {number}")
            raise self._error(f"its type {kind} is not one of {known}", name)
        return name, TYPES[number], shape, offset

    def _placed(
        self,
        name: str,
        kind: TensorType,
        shape: tuple[int, ...],
        data: int,
        offset: int,
        alignment: int,
    ) -> GgufTensor:
        if not all(shape) or shape[-1] % kind.elements:
            reason = f"corrupt header: {kind.name} of shape {shape}, in blocks of {kind.elements}"
            raise self._error(reason, name)
        n_bytes = math.prod(shape) // kind.elements * kind.n_bytes
        if offset % alignment:
            raise self._error(f"corrupt header: its offset {offset} is not aligned", name)
        if data + offset + n_bytes > self._size:
            end = data + offset + n_bytes
            raise self._error(
                "truncated, as an unfinished download is: it ends at byte "
                f"{end}, the file has {self._size}",
                name,
            )
        return GgufTensor(name, kind, shape, data + offset, n_bytes)
