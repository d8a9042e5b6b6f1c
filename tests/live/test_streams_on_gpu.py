"""Asked of a GPU: green contexts keep to their multiprocessors, layers that stream to their order,
host memory is locked, and a small fleet under pressure keeps its tokens."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
import torch

from ballast.core.job import Job
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import MiB
from ballast.live.cuda_runner import TorchOnGpu
from ballast.live.cuda_streams import GreenStreams, lane_streams
from ballast.live.event_stream import EventStream
from ballast.memory.copies import Copy
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.cuda.vm import CudaVm
from benchmarks.gpu_fleet import proved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

GPU = torch.device("cuda", 0)
LAYER = 4 * MiB


@pytest.fixture
def driver() -> CudaDriver:
    made = CudaDriver()
    made.set_current(made.retain_context(made.device(0)))
    return made


def multiprocessors(compute: TorchOnGpu, stream: int) -> set[int]:
    """That a kernel of many programs runs on."""
    from tests.engine.where_code import where_code

    with compute.on(stream):
        out = torch.full((4096,), -1, dtype=torch.int32, device=GPU)
        where_code[(len(out),)](out)
        found = set(out.tolist())
    assert -1 not in found
    return found


def test_jobs_at_the_same_time_have_multiprocessors_of_their_own(driver: CudaDriver) -> None:
    streams = lane_streams(driver, driver.device(0), 2)
    if not isinstance(streams, GreenStreams):
        pytest.skip("the driver has no green contexts")
    compute = TorchOnGpu(0)
    jobs = [Job(id=lane, lane=lane, model="m", work=(), parts=1) for lane in range(2)]
    taken = [streams.acquire(job) for job in jobs]
    halves = [multiprocessors(compute, stream) for stream in taken]
    twin = multiprocessors(compute, streams.twin(taken[0]))
    for job in jobs:
        streams.release(job)
    whole = Job(id=9, lane=0, model="m", work=())
    alone = multiprocessors(compute, streams.acquire(whole))
    assert halves[0].isdisjoint(halves[1])
    assert twin <= halves[0]
    assert len(alone) > max(map(len, halves))
    streams.release(whole)
    streams.close()


def test_layers_that_rotate_are_there_when_they_are_read(driver: CudaDriver) -> None:
    """Passes follow each other without the host waiting, as fast as a GPU goes."""
    n, slots = 6, 2
    host = torch.empty((n, LAYER // 4), dtype=torch.float32, pin_memory=True)
    for layer in range(n):
        host[layer] = layer + 1
    vm = CudaVm(driver, 0, 2 * MiB, n * LAYER // (2 * MiB))
    each = LAYER // vm.page_bytes
    assert vm.populate(range(n * each)) is None
    r = vm.reserve(n * LAYER)
    vm.map(r, 0, range(each * slots))
    for layer in range(slots, n):
        at = layer % slots * each
        vm.map(r, layer * each, range(at, at + each), alias=True)
    compute, lane = TorchOnGpu(0), driver.new_stream()
    copies = [Copy(r.address(i * each), host[i].data_ptr(), LAYER) for i in range(n)]
    context = driver.retain_context(driver.device(0))
    pins = PinnedMemory(driver, 0)
    layers = EventStream(driver, context, compute.current, lambda: None, pins)
    layers.add_weights(copies)
    layers.remap(Rotation(tuple(range(n)), slots), [-1] * slots, ())
    views = [cuda_tensor_at(c.dst, (LAYER // 4,), torch.float32, GPU) for c in copies]
    sums = torch.zeros((20, n), device=GPU)
    with compute.on(lane):
        for row in sums:
            layers.begin_pass()
            for layer, view in enumerate(views):
                layers.wait(layer)
                row[layer] = view.max() + view.min()
                layers.used(layer)
    driver.finish(lane)
    assert sums.tolist() == [[2.0 * (layer + 1) for layer in range(n)]] * len(sums)
    layers.rest()
    layers.remap(WHOLE, (), ())
    layers.close()
    pins.close()
    driver.destroy_stream(lane)
    driver.release_context(driver.device(0))
    vm.close()


def test_host_memory_of_the_tier_is_page_locked(driver: CudaDriver) -> None:
    from benchmarks.gpu_pages import host_bytes

    pins = PinnedMemory(driver, 0)
    with host_bytes(LAYER, writable=not pins.reads_only) as address:
        assert pins.pin(address, LAYER)
        pins.unpin(address)
    pins.close()


def test_a_small_fleet_under_pressure_keeps_its_tokens() -> None:
    result = proved("float32", GPU, each=2, tokens=16, lanes=2)
    assert result["wrong"] == 0
    assert result["evictions"] + result["preemptions"] > 0
    assert result["replays"] > 0
    # What it had pinned can be freed, and used again, though its streams are gone.
    gc.collect()
    assert torch.empty(LAYER, dtype=torch.uint8, pin_memory=True).is_pinned()
