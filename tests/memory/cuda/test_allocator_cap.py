"""The cap is handed to PyTorch's allocator, and what it keeps beyond is given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ballast.core.units import MiB
from ballast.memory.cuda.allocator_cap import CudaAllocatorCap


class Allocator:
    """What is asked of `torch.cuda`, for device 1 of 1000 MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.in_use, self.kept = 1.0, 0, 0
        for name in ("mem_get_info", "get_device_properties", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)

    def stats(self, device: int) -> dict[str, dict[str, dict[str, int]]]:
        assert device == 1
        return {"reserved_bytes": {"all": {"current": self.in_use + self.kept}}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return 500 * MiB, 990 * MiB

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1000 * MiB)

    def set_fraction(self, fraction: float, device: int) -> None:
        assert 0 <= fraction <= 1
        assert device == 1
        self.allowed = fraction

    def empty_cache(self) -> None:
        self.kept = 0


def test_the_allocator_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda = Allocator(monkeypatch)
    cap = CudaAllocatorCap(1, 250 * MiB)
    assert torch_cuda.allowed == 0.25
    torch_cuda.in_use, torch_cuda.kept = 100 * MiB, 100 * MiB
    assert cap.check()
    assert torch_cuda.kept, "within the cap nothing is given back"
    assert cap.resize(150 * MiB)
    assert (torch_cuda.allowed, torch_cuda.kept) == (0.15, 0)
    assert not cap.resize(50 * MiB)
    torch_cuda.in_use = 0
    assert cap.resize(2000 * MiB)
    assert torch_cuda.allowed == 1.0
    cap.close()


def test_two_devices_on_one_gpu_may_have_what_both_may(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda = Allocator(monkeypatch)
    one = CudaAllocatorCap(1, 200 * MiB)
    two = CudaAllocatorCap(1, 300 * MiB)
    assert torch_cuda.allowed == 0.5
    torch_cuda.in_use, torch_cuda.kept = 450 * MiB, 40 * MiB
    assert one.check()
    assert two.check()
    assert torch_cuda.kept, "neither takes the other's for too much"
    assert not one.resize(100 * MiB)
    assert (torch_cuda.allowed, torch_cuda.kept) == (0.4, 0)
    torch_cuda.in_use = 90 * MiB
    two.close()
    two.close()
    assert torch_cuda.allowed == 0.1
    assert one.check()
    one.close()
    assert torch_cuda.allowed == 1.0
