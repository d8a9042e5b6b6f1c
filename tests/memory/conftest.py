"""One vm of each kind, small pages, closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ballast.core.units import KiB
from ballast.memory import syscalls
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.vm import Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 * KiB
N_PAGES = 32


@pytest.fixture
def memfd() -> Iterator[MemfdVm]:
    made = MemfdVm(PAGE, N_PAGES)
    yield made
    made.close()


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver(devices=2)
    yield made
    assert made.is_clean()


@pytest.fixture
def cuda(driver: FakeDriver) -> Iterator[CudaVm]:
    """All its pages have memory: a GPU cannot map others."""
    made = CudaVm(driver, 0, PAGE, N_PAGES)
    assert made.populate(range(N_PAGES)) is None
    yield made
    made.close()


@pytest.fixture
def beside(vm: Vm) -> Iterator[Callable[[int], Vm]]:
    """More devices of the kind of `vm`, of so many pages, with a life of their own."""
    made: list[Vm] = []

    def make(n_pages: int) -> Vm:
        if isinstance(vm, CudaVm):
            made.append(CudaVm(vm.driver, 1, PAGE, n_pages))
        else:
            made.append(
                MemfdVm(PAGE, n_pages) if isinstance(vm, MemfdVm) else NullVm(PAGE, n_pages)
            )
        assert made[-1].populate(range(n_pages)) is None
        return made[-1]

    yield make
    for other in made:
        other.close()


@pytest.fixture(params=["null", "memfd", "memfd by mmap", "cuda"])
def vm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vm]:
    if request.param == "cuda":
        yield request.getfixturevalue("cuda")
        return
    if request.param == "memfd by mmap":
        monkeypatch.setattr(syscalls, "can_move_page_tables", lambda: False)
    made: Vm = NullVm(PAGE, N_PAGES) if request.param == "null" else MemfdVm(PAGE, N_PAGES)
    yield made
    made.close()
