"""Make CPU tensors and arrays over raw addresses, without copying, owning or touching memory.

A view may be made over unbacked addresses, but reading or writing it there is a fatal signal. It
stays valid as long as its addresses are reserved, whichever pages back them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def tensor_at(
    address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A CPU tensor of `shape` at `address`, contiguous or with `strides` counted in elements.

    Strides are not negative. Raises ValueError if `address` is not aligned to the element.
    """
    n_bytes = _span(shape, strides) * dtype.itemsize
    _check(address, dtype.itemsize)
    if n_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=dtype)
    if strides is None:
        return flat.view(tuple(shape))
    return flat.as_strided(tuple(shape), tuple(strides))


def array_at(
    address: int,
    shape: Sequence[int],
    dtype: np.dtype[Any] | type[np.generic] | str,
    strides: Sequence[int] | None = None,
) -> np.ndarray[Any, Any]:
    """Make an array like `tensor_at`, for kernels: bfloat16 is passed as uint16. Strides count
    elements, not bytes."""
    kind: np.dtype[Any] = np.dtype(dtype)
    n_bytes = _span(shape, strides) * kind.itemsize
    _check(address, kind.itemsize)
    if n_bytes == 0:
        return np.empty(tuple(shape), dtype=kind)
    buffer = (ctypes.c_char * n_bytes).from_address(address)
    steps = None if strides is None else tuple(s * kind.itemsize for s in strides)
    return np.ndarray(tuple(shape), kind, memoryview(buffer), 0, steps)


def _span(shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """Elements from the first to one past the last."""
    if 0 in shape:
        return 0
    if strides is None:
        return math.prod(shape)
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _check(address: int, item_bytes: int) -> None:
    if address <= 0 or address % item_bytes:
        raise ValueError(f"address {address:#x} is not aligned to elements of {item_bytes} bytes")
