"""Compute linear layers by oneDNN on weights in its packed layout, in the pool's memory.

Used by models, for the numbers of rows where oneDNN is faster (`choices.py`). oneDNN packs a matrix
for its kernels on this CPU and describes the layout in a *descriptor* (`describe`). Bytes copied
from a packed tensor, together with its descriptor, can be used as such a tensor (`view`), through
the C interface that PyTorch keeps for compiled models.

On AVX-512 the layout is often that of our own panels (`linear.py`): then the same bytes serve our
kernel for few rows and oneDNN's for many.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ballast.kernels import linear
from ballast.kernels.linear_code import PANEL

MOST_DIMS = 12
_HINT = 16
"""Number of rows for which oneDNN packs: for a single row it does not pack."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Layout of a packed matrix in memory."""

    raw: bytes
    n_bytes: int
    panels: bool
    """Whether the layout equals that of `linear.pack`."""


@functools.cache
def describe(n: int, k: int, dtype: torch.dtype) -> Descriptor | None:
    """Describe oneDNN's packing of an (n, k) matrix; None if oneDNN does not pack it here, or
    PyTorch lacks oneDNN.

    Also None for bfloat16 on CPUs without instructions for it: oneDNN then converts on the fly, at
    a quarter of the speed of float32.
    """
    if dtype is torch.bfloat16 and not _native_bfloat16():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.empty(n, k, dtype=dtype), _HINT)
        raw = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).flatten().tolist())
        n_bytes = int(torch.ops.mkldnn._nbytes(packed))
        _interface()
    except (RuntimeError, AttributeError, OSError):
        return None
    blocks = _inner_blocks(raw)
    if not blocks:
        return None
    panels = n_bytes == linear.packed_bytes(n, k, dtype) and _are_panels(raw, blocks, k, dtype)
    return Descriptor(raw, n_bytes, panels)


def pack(weight: Tensor) -> Tensor:
    """Return `weight` (n, k) in the layout of `describe`, as uint8."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT)
    n_bytes = int(torch.ops.mkldnn._nbytes(packed))
    out = torch.empty(n_bytes, dtype=torch.uint8)
    ctypes.memmove(out.data_ptr(), torch.ops.mkldnn.data_ptr(packed), n_bytes)
    return out


def view(address: int, n: int, k: int, dtype: torch.dtype, descriptor: Descriptor) -> Tensor:
    """Return the packed matrix at `address`, which may have no memory yet, for oneDNN's kernels."""
    library = _interface()
    sizes, strides = (ctypes.c_int64 * 2)(n, k), (ctypes.c_int64 * 2)(k, 1)
    raw = ctypes.create_string_buffer(descriptor.raw, len(descriptor.raw))
    kind = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    handle = ctypes.c_void_p()
    status = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{kind}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        raw,
        ctypes.c_int64(len(descriptor.raw)),
    )
    if status != 0:
        raise RuntimeError(f"PyTorch made no tensor of packed weights (status {status})")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    made: Any = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))
    return made  # type: ignore[no-any-return]


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias for x (rows, k) of the weights' dtype, W a `view`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@functools.cache
def _interface() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.aoti_torch_create_tensor_from_blob_v2.restype = ctypes.c_int32
    torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # noqa: B018
    return library


def has_tiles() -> bool:
    """Return whether oneDNN multiplies bfloat16 by AMX here, many times as fast as by vectors."""
    cpu: Any = torch.cpu
    return bool(cpu._is_amx_tile_supported())


def _native_bfloat16() -> bool:
    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or has_tiles())


# The descriptor is the struct `dnnl_memory_desc` of oneDNN 3: ndims, dims, data type, padded dims,
# padded offsets, offset, kind, and of the blocked kind strides, number of inner blocks, their
# sizes and the dimensions they belong to; all arrays have twelve elements.
_STRUCT = struct.Struct("=i4x12qi4x12q12qqi4x12qi4x12q12q")
_STRIDES, _N_INNER = 40, 52


def _inner_blocks(raw: bytes) -> list[tuple[int, int]]:
    """(size, dimension) of each level of blocks, from the outermost; empty: not packed."""
    if len(raw) < _STRUCT.size:
        return []
    fields = _STRUCT.unpack_from(raw)
    n = fields[_N_INNER]
    if not 0 < n <= MOST_DIMS:
        return []
    return [(fields[_N_INNER + 1 + i], fields[_N_INNER + 13 + i]) for i in range(n)]


def _are_panels(raw: bytes, blocks: list[tuple[int, int]], k: int, dtype: torch.dtype) -> bool:
    _, steps, _, group = (*linear.packed_shape(PANEL, k, dtype), 1)[:4]
    inner = blocks if group == 1 else blocks[:-1]
    if group > 1 and blocks[-1] != (group, 1):
        return False
    if [d for _, d in inner] != [1, 0] or inner[1][0] != PANEL:
        return False
    fields = _STRUCT.unpack_from(raw)
    across, along = fields[_STRIDES : _STRIDES + 2]
    block = inner[0][0] * group
    return bool(along == PANEL * block and across == PANEL * steps * group)
