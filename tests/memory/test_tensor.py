"""Views over raw addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ballast.core.units import KiB
from ballast.memory.tensor import array_at, tensor_at
from ballast.memory.vm_memfd import MemfdVm

PAGE = 64 * KiB


def test_both_views_are_the_same_memory(memfd: MemfdVm) -> None:
    r = memfd.reserve(2 * PAGE)
    memfd.map(r, 0, [3, 7])
    t = tensor_at(r.base + 64, (3, 5), torch.float32)
    a = array_at(r.base + 64, (3, 5), np.float32)
    t.copy_(torch.arange(15.0).view(3, 5))
    assert a.tolist() == t.tolist()
    assert t.data_ptr() == r.base + 64
    assert t.is_contiguous()
    whole = tensor_at(r.base, (2 * PAGE // 2,), torch.bfloat16)
    whole.fill_(1.5)
    assert (array_at(r.base, (2 * PAGE // 2,), "uint16") == 0x3FC0).all()


def test_strides_count_elements(memfd: MemfdVm) -> None:
    r = memfd.reserve(PAGE)
    memfd.map(r, 0, [0])
    flat = array_at(r.base, (64,), "int32")
    flat[:] = np.arange(64)
    t = tensor_at(r.base, (3, 4), torch.int32, (20, 2))
    a = array_at(r.base, (3, 4), "int32", (20, 2))
    assert t.tolist() == a.tolist() == [[20 * i + 2 * j for j in range(4)] for i in range(3)]


def test_a_view_outlives_its_pages(memfd: MemfdVm) -> None:
    r = memfd.reserve(4 * PAGE)
    t = tensor_at(r.address(1), (PAGE,), torch.uint8)
    memfd.map(r, 1, [2])
    t.fill_(6)
    memfd.unmap(r, 1, 1)
    memfd.map(r, 1, [5])
    assert int(t.sum()) == 0
    memfd.unmap(r, 1, 1)
    memfd.map(r, 1, [2])
    assert int(t.sum()) == 6 * PAGE


def test_empty_and_misaligned() -> None:
    assert tensor_at(8, (0, 4), torch.float32).shape == (0, 4)
    assert array_at(8, (2, 0), "float32").shape == (2, 0)
    with pytest.raises(ValueError, match="aligned"):
        tensor_at(6, (4,), torch.float32)
    with pytest.raises(ValueError, match="aligned"):
        array_at(0, (4,), "float32")
