"""What NVML tells is told, whole GPUs and slices; what it does not tell is left open."""

from __future__ import annotations

import inspect

import pytest

from ballast.core.errors import DeviceError
from ballast.memory.cuda.devices import driver_version, find_gpus
from tests.memory.fake_cuda import FakeDriver
from tests.memory.fake_nvml import Board, FakeNvml


def uuid(i: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{i:012x}"


def test_two_gpus_and_an_older_one() -> None:
    both = (uuid(0), uuid(1))
    nvml = FakeNvml(
        [
            Board(uuid(1), nvlinks=18, reads=both[:1], over_nvlink=both[:1]),
            Board(uuid(0), nvlinks=18, reads=both[1:], over_nvlink=both[1:]),
            Board(uuid(9), "Tesla T4", 16 << 30, 15 << 30, (3, 16)),
        ]
    )
    first, second, old = find_gpus(FakeDriver(devices=2), nvml)
    assert (first.uuid, first.ordinal, second.ordinal, old.ordinal) == (uuid(1), 1, 0, None)
    assert (first.name, first.memory_bytes, first.free_bytes) == (
        "NVIDIA H100 80GB HBM3",
        80 << 30,
        79 << 30,
    )
    assert (first.nvlinks, first.nvlink_version, old.nvlink_version) == (18, 4, None)
    assert (first.reads, first.reads_over_nvlink) == (both[:1], both[:1])
    assert (first.multiprocessors, old.multiprocessors) == (1, None)
    assert first.pcie_bytes_per_second == pytest.approx(63e9, rel=0.01)
    assert old.pcie_bytes_per_second == pytest.approx(15.8e9, rel=0.01)
    assert (old.nvlinks, old.reads, old.slice_of) == (0, (), None)
    assert nvml.started == 0
    assert driver_version(nvml) == "580.95.05"


def test_slices() -> None:
    cut = Board(
        uuid(0),
        nvlinks=18,
        reads=(uuid(1),),
        slices=[("MIG-a", 10 << 30, 16), None, ("MIG-b", 40 << 30, 60)],
    )
    a, b, whole = find_gpus(nvml=FakeNvml([cut, Board(uuid(1), slices=None)]))
    assert (a.uuid, a.memory_bytes, a.multiprocessors, a.slice_of) == (
        "MIG-a",
        10 << 30,
        16,
        uuid(0),
    )
    assert (b.uuid, b.multiprocessors, b.reads, b.nvlinks, b.pcie) == ("MIG-b", 60, (), 0, (5, 16))
    assert (whole.uuid, whole.multiprocessors, whole.slice_of) == (uuid(1), None, None)


def test_what_is_not_told() -> None:
    [gpu] = find_gpus(nvml=FakeNvml([Board(uuid(0), pcie=None)]))
    assert (gpu.pcie, gpu.pcie_bytes_per_second) == (None, None)
    [gpu] = find_gpus(nvml=FakeNvml([Board(uuid(0), pcie=(7, 16))]))
    assert gpu.pcie_bytes_per_second is None
    assert find_gpus(nvml=FakeNvml()) == []


def test_without_a_driver() -> None:
    with pytest.raises(DeviceError, match="nvmlInit: NVML Shared Library Not Found"):
        find_gpus(nvml=FakeNvml(driver=False))


def test_the_fake_is_asked_as_the_real_one_is() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in dir(FakeNvml):
        if name.startswith("nvml"):
            assert name.startswith(("nvmlDeviceGet", "nvmlSystemGet", "nvmlInit", "nvmlShutdown"))
            ours = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
            assert ours == list(inspect.signature(getattr(real, name)).parameters), name
        elif name.startswith("NVML_"):
            assert getattr(FakeNvml, name) == getattr(real, name), name
    assert issubclass(real.NVMLError, Exception)
