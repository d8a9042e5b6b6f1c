"""Define segments (tensors packed one after the other) and the pieces in which they are filled."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.core.units import MiB, ceil_div

PLAIN = "plain"
"""Layout of a tensor as it was stored."""
TENSOR_ALIGNMENT = 64
PIECE_BYTES = 4 * MiB
"""Bytes filled and hashed at once by a thread; a multiple of the operating system's page and of
elements."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor within a segment, contiguous at byte `offset`; `names` of its parameters.

    `layout`: order of its elements; `sources`: names of the architecture's tensors that it is made
    from (`ballast.weights.packing`). `parts`: the number of equal parts in which it can be filled,
    if it is not as stored.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    offset: int
    n_bytes: int
    layout: str
    sources: tuple[str, ...]
    parts: int = 1
    form: str = ""
    """The form of quantised panels (`ballast.kernels.panel_forms`); empty: it is in `dtype`."""

    @property
    def as_stored(self) -> bool:
        """Whether it can be filled in pieces: stored tensors one after the other."""
        return self.layout == PLAIN

    @property
    def piece_bytes(self) -> int:
        """Bytes that are filled at once."""
        return PIECE_BYTES if self.as_stored else self.n_bytes // self.parts


@dataclass(frozen=True, slots=True)
class Segment:
    """The unit of weights that is loaded and evicted. `n_bytes`: its packed size, a multiple of
    64."""

    name: str
    n_bytes: int
    tensors: tuple[PackedTensor, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start .. start + n_bytes` of one tensor, which are written to `address`."""

    tensor: PackedTensor
    start: int
    n_bytes: int
    address: int


TensorsByRole = Mapping[str, tuple[PackedTensor, int]]
"""A segment's tensors and their device addresses, by role in the layer."""


Fill = Callable[[Piece], bytes]
"""Writes the piece's bytes at its address; returns a digest of them."""


Origin = Callable[[Segment], str | None]
"""Returns the identity of the sources of a segment's bytes: equal only if the bytes are; None:
unknown."""


def pack(name: str, tensors: Sequence[PackedTensor]) -> Segment:
    """Lay tensors out one after the other, whatever their `offset` was."""
    packed, at = [], 0
    for tensor in tensors:
        packed.append(replace(tensor, offset=at))
        at = _up(at + tensor.n_bytes, TENSOR_ALIGNMENT)
    return Segment(name, at, tuple(packed))


def whole_pages(segment: Segment) -> int:
    """Return the bytes of a segment's memory, in whole pages of the operating system."""
    return _up(max(segment.n_bytes, 1), mmap.PAGESIZE)


def _up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple
