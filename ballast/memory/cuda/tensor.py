"""Make PyTorch tensors over given GPU addresses, without copying, owning or accessing memory.

Used for views of KV caches and weights. A view may be made before its addresses are backed, and
stays valid as long as they are reserved. It is made from a DLPack capsule, which names the device:
with a bare pointer (`__cuda_array_interface__`) PyTorch would query the driver for the device,
which fails for addresses that are not backed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2
_UNSIGNED = 1
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor of DLPack 0.8, and the one number of its shape."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("n_bytes", ctypes.c_int64),
    )


_libc = ctypes.CDLL(None)
_malloc = _libc.malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_free = _libc.free
_free.restype, _free.argtypes = None, [ctypes.c_void_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_unused = ctypes.pythonapi.PyCapsule_IsValid
_is_unused.restype, _is_unused.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def cuda_tensor_at(
    address: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """Make a tensor of `shape` at `address` of `device`, contiguous or with `strides` in elements.

    Strides are not negative. Raises ValueError if `address` is not aligned to the element.
    """
    if address <= 0 or address % dtype.itemsize:
        raise ValueError(f"address {address:#x} is not aligned to {dtype}")
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    n = math.prod(shape)
    if strides is not None:
        n = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    flat = _bytes_at(address, n * dtype.itemsize, device).view(dtype)
    if strides is None:
        return flat.view(tuple(shape))
    return flat.as_strided(tuple(shape), tuple(strides))


def _bytes_at(address: int, n_bytes: int, device: torch.device) -> torch.Tensor:
    kind = _CUDA if device.type == "cuda" else _CPU
    # Of the C library, and its `free` the deleter: whoever drops the tensor needs no Python.
    at = _malloc(ctypes.sizeof(_Managed))
    if not at:
        raise MemoryError
    managed = _Managed.from_address(at)
    managed.tensor = _Tensor(
        address, _Device(kind, device.index or 0), 1, _Type(_UNSIGNED, 8, 1), 0, 0, 0
    )
    managed.tensor.shape = at + _Managed.n_bytes.offset
    managed.context, managed.n_bytes = None, n_bytes
    managed.deleter = ctypes.cast(_free, ctypes.c_void_p).value
    capsule = _new_capsule(at, _NAME, None)
    try:
        return from_dlpack(capsule)
    finally:
        if _is_unused(capsule, _NAME):
            _free(at)
