"""What the stand-ins of the driver take for granted, asked of a real one."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ballast.core.clock import VirtualClock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction
from ballast.core.units import GiB, MiB
from ballast.memory.copies import Copy
from ballast.memory.cuda.allocator_cap import CudaAllocatorCap
from ballast.memory.cuda.devices import find_gpus
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.link import CudaLink
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.share import send_pages
from ballast.memory.vm import Range

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

PAGE = 2 * MiB


@pytest.fixture(scope="module")
def real() -> CudaDriver:
    try:
        return CudaDriver()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def vm(real: CudaDriver) -> Iterator[CudaVm]:
    made = CudaVm(real, 0, PAGE, 16)
    assert made.populate(range(16)) is None
    yield made
    torch.cuda.synchronize()
    made.close()


def page(range: Range, at: int) -> torch.Tensor:
    return cuda_tensor_at(range.address(at), (PAGE,), torch.uint8, torch.device("cuda", 0))


def test_contents_follow_the_page_and_aliases_are_one_memory(vm: CudaVm) -> None:
    a, b = vm.reserve(8 * PAGE), vm.reserve(8 * PAGE)
    views = [page(a, i) for i in range(8)]
    vm.map(a, 0, [7, 8, 3])
    for i in range(3):
        views[i].fill_(11 * (i + 1))
    torch.cuda.synchronize()
    vm.map(b, 3, [8], alias=True)
    assert page(b, 3).float().mean().item() == 22
    assert (vm.os_pages(a), vm.os_pages(b)) == ({0: 7, 1: 8, 2: 3}, {3: 8})
    torch.cuda.synchronize()
    vm.unmap(a, 0, 3)
    assert vm.os_pages(a) == {}
    vm.map(a, 4, [3, 7])
    assert [views[i].float().mean().item() for i in (4, 5)] == [33, 11]


def test_memory_that_there_is_not_is_short(real: CudaDriver) -> None:
    vm = CudaVm(real, 0, GiB, 1024)
    short = vm.populate(range(1024))
    assert short is not None
    assert short.pages == 1024 - vm.physical_bytes() // GiB
    vm.close()


_FAULTING = """
import torch
from ballast.core.errors import DeviceError, DeviceLost
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.cuda.vm import CudaVm

driver = CudaDriver()
vm = CudaVm(driver, 0, 2 << 20, 4)
seen = []
driver.when_lost(seen.append)
at = vm.reserve(2 << 20)
stream = torch.cuda.current_stream().cuda_stream
vm.watch(stream)
cuda_tensor_at(at.base, (1024,), torch.float32, torch.device("cuda", 0)).fill_(1)
try:
    driver.finish(stream)
except DeviceLost as error:
    assert seen == [error] and driver.lost is error, seen
    for call in (vm.fence, lambda: vm.populate([0]), lambda: driver.finish(stream)):
        try:
            call()
        except DeviceLost:
            continue
        raise SystemExit(f"{call} went well on a GPU that is lost")
    print("lost", error.reason)
import os
os._exit(0)  # what is left cannot be given back
"""


def test_a_kernel_that_touches_what_is_not_there_loses_the_device(real: CudaDriver) -> None:
    """In another process, which is of no use afterwards."""
    ended = subprocess.run([sys.executable, "-c", _FAULTING], capture_output=True, text=True)
    assert ended.stdout.startswith("lost CUDA_ERROR_"), ended.stdout + ended.stderr


def test_two_caps_of_one_gpu_are_held_to_their_sum(real: CudaDriver) -> None:
    held = torch.cuda.memory_reserved(0)
    one, two = CudaAllocatorCap(0, held + 256 * MiB), CudaAllocatorCap(0, 256 * MiB)
    try:
        most = torch.empty(384 * MiB, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MiB, dtype=torch.uint8, device="cuda:0")
        assert one.check()
        assert two.check()
        del most
    finally:
        one.close()
        two.close()
        torch.cuda.empty_cache()


def test_a_fence_waits_for_the_lane(vm: CudaVm) -> None:
    lane = torch.cuda.Stream()
    vm.watch(lane.cuda_stream)
    with torch.cuda.stream(lane):
        torch.cuda._sleep(200_000_000)
    fence = vm.fence()
    assert not fence.done()
    lane.synchronize()
    assert fence.done()


def test_copies_both_ways_from_pinned_memory(real: CudaDriver, vm: CudaVm) -> None:
    result: queue.Queue[TransferDoneEvent] = queue.Queue()
    link, pins = CudaLink(real, 0, VirtualClock(), result.put), PinnedMemory(real, 0)
    r = vm.reserve(4 * PAGE)
    vm.map(r, 0, [3, 1, 4, 15])
    source = torch.randint(0, 255, (4 * PAGE + 8192,), dtype=torch.uint8)
    address = -(-source.data_ptr() // 4096) * 4096
    assert pins.pin(address, 4 * PAGE, read_only=False)
    back = np.zeros(4 * PAGE, dtype=np.uint8)
    link.start(1, [Copy(r.base, address, 4 * PAGE)])
    assert result.get(timeout=240).error is None
    link.start(2, [Copy(back.ctypes.data, r.base, 4 * PAGE)], direction=Direction.TO_HOST)
    assert result.get(timeout=240).error is None
    start = address - source.data_ptr()
    assert (back == source.numpy()[start : start + 4 * PAGE]).all()
    link.close()
    pins.close()


_CHILD = """
import socket, sys
import torch
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.share import receive_pages
from ballast.memory.cuda.vm import CudaVm

connection = socket.socket(fileno=int(sys.argv[1]))
received = receive_pages(connection)
vm = CudaVm(CudaDriver(), 0, received.page_bytes, 4)
first = vm.attach(received)
r = vm.reserve(4 * vm.page_bytes)
vm.map(r, 1, [first + page for page in received.pages])
there = torch.device("cuda", 0)
seen = cuda_tensor_at(r.address(1), (2, vm.page_bytes), torch.uint8, there)
connection.sendall(bytes(seen[:, 5].tolist()))
seen[1].fill_(77)
torch.cuda.synchronize()
vm.close()
connection.sendall(b"k")
"""


def test_pages_go_to_another_process(vm: CudaVm) -> None:
    r = vm.reserve(2 * PAGE)
    vm.map(r, 0, [5, 9])
    page(r, 0).fill_(1)
    page(r, 1).fill_(2)
    torch.cuda.synchronize()
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _CHILD, str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.settimeout(120)
    exported = vm.export([5, 9])
    send_pages(ours, exported)
    exported.close()
    assert ours.recv(2) == bytes([1, 2])
    assert ours.recv(1) == b"k"
    assert (page(r, 0)[9].item(), page(r, 1)[9].item()) == (1, 77)
    assert child.wait(240) == 0
    ours.close()


def test_pytorch_stays_within_its_cap() -> None:
    torch.cuda.empty_cache()
    had = torch.cuda.memory_reserved(0)
    cap = CudaAllocatorCap(0, had + 64 * MiB)
    held = torch.empty(32 * MiB, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 * MiB, dtype=torch.uint8, device="cuda:0")
    assert cap.check()
    del held
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_nvml_and_cuda_speak_of_the_same_device(real: CudaDriver) -> None:
    pytest.importorskip("pynvml")
    [gpu] = [gpu for gpu in find_gpus(real) if gpu.ordinal == 0]
    result = torch.cuda.get_device_properties(0)
    assert gpu.multiprocessors == result.multi_processor_count
    assert abs(gpu.memory_bytes - result.total_memory) < 0.1 * result.total_memory
