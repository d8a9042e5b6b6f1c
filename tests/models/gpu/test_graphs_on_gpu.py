"""What graphs take for granted, asked of a GPU: addresses stay good while pages beneath move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ballast.core.units import GiB, MiB
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.live.cuda_runner import TorchOnGpu
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.cuda.vm import CudaVm
from ballast.models.gpu.graphs import GraphCache, Step
from ballast.models.gpu.recording import Recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

PAGE = 2 * MiB
BUCKET = Bucket.decode(1, 1)


@pytest.fixture
def driver() -> CudaDriver:
    made = CudaDriver()
    made.set_current(made.retain_context(made.device(0)))
    return made


@pytest.fixture
def vm(driver: CudaDriver) -> Iterator[CudaVm]:
    made = CudaVm(driver, 0, PAGE, 4)
    assert made.populate(range(4)) is None
    yield made
    torch.cuda.synchronize()
    made.close()


def page(address: int) -> torch.Tensor:
    return cuda_tensor_at(address, (PAGE // 4,), torch.float32, torch.device("cuda", 0))


class Lane:
    """A stream, and graphs recorded for it."""

    def __init__(self, driver: CudaDriver) -> None:
        self.compute = TorchOnGpu(0)
        self.stream, twin = driver.new_stream(), driver.new_stream()
        self.cache = GraphCache(64 * MiB, lambda _: self.compute.recorder(twin))

    def record(self, step: Step, cuts: tuple[int, ...] = ()) -> None:
        with self.cache.on(self.stream):
            self.cache.want("m", BUCKET, step, cuts)
        self.cache.record_one()

    def replay(self) -> list[float]:
        with self.cache.on(self.stream), self.compute.on(self.stream):
            found = self.cache.find("m", BUCKET)
            assert found is not None
            return found.replay(None)[:3].tolist()


def test_a_graph_reads_whatever_page_is_mapped_when_it_runs(driver: CudaDriver, vm: CudaVm) -> None:
    at = vm.reserve(PAGE)
    for number in range(3):
        vm.map(at, 0, [number])
        page(at.base).fill_(number + 1)
        torch.cuda.synchronize()
        vm.unmap(at, 0, 1)
    lane, view = Lane(driver), page(at.base)

    def compute() -> torch.Tensor:
        return view[:8] * 2 + torch.mm(view[:16].view(4, 4), view[:16].view(4, 4)).flatten()[:8]

    with lane.compute.on(lane.stream):
        vm.map(at, 0, [0])
        compute()
        torch.cuda.synchronize()
        vm.unmap(at, 0, 1)
    lane.record(lambda recording: compute())  # of addresses that nothing backs
    for number in (1, 0, 2, 1):
        vm.map(at, 0, [number])
        n = number + 1.0
        assert lane.replay() == [2 * n + 4 * n * n] * 3
        vm.unmap(at, 0, 1)
    lane.cache.close()


def test_what_waits_comes_between_pieces(driver: CudaDriver, vm: CudaVm) -> None:
    at = vm.reserve(PAGE)
    vm.map(at, 0, [0])
    view = page(at.base)
    view.fill_(1)
    torch.cuda.synchronize()
    lane = Lane(driver)

    class RecordedBarriers:
        def __init__(self) -> None:
            self.layers: list[tuple[str, int]] = []

        def wait(self, layer: int) -> None:
            self.layers.append(("wait", layer))
            view.add_(10)  # on the lane's stream

        def used(self, layer: int) -> None:
            self.layers.append(("used", layer))

    def step(recording: Recording) -> torch.Tensor:
        x = view[:8] + 0
        recording.wait(1)
        x = x * 100 + view[:8]
        recording.used(1)
        return x + 0

    lane.record(step, (1,))
    result = RecordedBarriers()
    with lane.cache.on(lane.stream), lane.compute.on(lane.stream):
        found = lane.cache.find("m", BUCKET, (1,))
        assert found is not None
        assert len(found.recording.pieces) == 3
        assert [found.replay(result)[0].item() for _ in range(2)] == [111, 1121]
    assert result.layers == [("wait", 1), ("used", 1)] * 2
    lane.cache.close()


def test_a_model_that_goes_leaves_the_workspaces_of_its_stream(driver: CudaDriver) -> None:
    """PyTorch's `CUDAGraph.reset()` frees the cuBLAS workspaces of the stream that it was recorded
    on. A product of few rows and a long inner dimension is split, and its parts lie there."""
    lane, bf16 = Lane(driver), torch.bfloat16
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16384, dtype=bf16, device="cuda:0") for _ in range(2))
    expected = (a @ b.t()).float()

    def step(recording: Recording) -> torch.Tensor:
        return (a @ b.t()).float()

    with lane.compute.on(lane.stream):
        step(Recording(lane.compute.recorder(lane.stream), ()))
    torch.cuda.synchronize()
    for model in ("gone", "m"):
        with lane.cache.on(lane.stream):
            lane.cache.want(model, BUCKET, step)
        lane.cache.record_one()
    lane.cache.forget("gone")
    torch.cuda.empty_cache()
    # Memory that was given back belongs to other tensors now, which must stay as they are.
    others = [torch.full((MiB // 4,), 7.0, device="cuda:0") for _ in range(256)]
    with lane.cache.on(lane.stream), lane.compute.on(lane.stream):
        found = lane.cache.find("m", BUCKET)
        assert found is not None
        for _ in range(3):
            assert torch.equal(found.replay(None), expected)
    torch.cuda.synchronize()
    assert all(bool((other == 7.0).all()) for other in others)
    lane.cache.close()


def test_what_waits_for_the_device_cannot_be_recorded(driver: CudaDriver) -> None:
    lane = Lane(driver)
    x = torch.ones(8, device="cuda:0")

    def step(recording: Recording) -> torch.Tensor:
        return x * x.sum().item()

    lane.record(step)
    assert lane.cache.report().graphs == 0
    lane.record(lambda recording: x * 3)
    assert lane.cache.report().graphs == 0, "the model is not tried again"
    assert (x * 3)[0].item() == 3, "PyTorch goes on as before"
    lane.cache.forget("m")
    lane.record(lambda recording: x * 3)
    assert lane.replay() == [3, 3, 3]
    lane.cache.close()
    # PyTorch makes room again, though a recording was broken off.
    held = torch.empty(GiB, dtype=torch.uint8, device="cuda:0")
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(0) < GiB
