"""Views over a device's addresses; on a CPU by the same way, except for what the capsule names."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from ballast.core.units import KiB
from ballast.memory.cuda import tensor as cuda_tensor
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.tensor import tensor_at
from ballast.memory.vm_memfd import MemfdVm

PAGE = 64 * KiB
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_it_is_the_same_memory(memfd: MemfdVm, dtype: torch.dtype) -> None:
    r = memfd.reserve(2 * PAGE)
    memfd.map(r, 0, [3, 7])
    mine = cuda_tensor_at(r.base + 64, (3, 5), dtype, CPU)
    mine.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(tensor_at(r.base + 64, (3, 5), dtype), mine)
    assert (mine.data_ptr(), mine.is_contiguous()) == (r.base + 64, True)
    part = cuda_tensor_at(r.base + 64, (2, 2), dtype, CPU, (5, 2))
    assert part.tolist() == [[0, 2], [5, 7]]
    assert cuda_tensor_at(r.base, (0, 3), dtype, CPU).shape == (0, 3)


def test_a_view_outlives_its_pages(cuda: CudaVm) -> None:
    """Made over addresses that back nothing: touching those would be a fault."""
    r = cuda.reserve(4 * PAGE)
    views = [cuda_tensor_at(r.address(i), (PAGE,), torch.uint8, CPU) for i in range(4)]
    cuda.map(r, 1, [2])
    views[1].fill_(6)
    cuda.unmap(r, 1, 1)
    cuda.map(r, 3, [2])
    assert int(views[3].sum()) == 6 * PAGE
    del views
    cuda.unmap(r, 3, 1)


def test_nothing_is_left_of_it(memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    malloc = cuda_tensor._malloc

    def counted(n_bytes: int) -> int:
        made.append(malloc(n_bytes))
        return made[-1]

    monkeypatch.setattr(cuda_tensor, "_malloc", counted)
    r = memfd.reserve(PAGE)
    memfd.map(r, 0, [1])
    for _ in range(1000):
        cuda_tensor_at(r.base, (PAGE,), torch.uint8, CPU)
    assert len(set(made)) < 100, "what is freed is used again"


def test_misaligned() -> None:
    for address in (6, 0, -4):
        with pytest.raises(ValueError, match="aligned"):
            cuda_tensor_at(address, (4,), torch.float32, CPU)


def test_the_capsule_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of PyTorch refuses it; what it would have been told is looked at here."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    result: list[tuple[Any, ...]] = []

    def look(capsule: object) -> torch.Tensor:
        managed = cuda_tensor._Managed.from_address(pointer(capsule, b"dltensor"))
        t = managed.tensor
        result.append((t.data, t.device.kind, t.device.ordinal, t.dimensions, t.type.code))
        result.append(
            (ctypes.c_int64.from_address(t.shape).value, t.type.bits, t.strides, t.offset)
        )
        raise RuntimeError("not here")

    monkeypatch.setattr(cuda_tensor, "from_dlpack", look)
    with pytest.raises(RuntimeError, match="not here"):
        cuda_tensor_at(1 << 40, (3, 5), torch.float32, torch.device("cuda", 2))
    assert result == [(1 << 40, 2, 2, 1, 1), (60, 8, None, 0)]
