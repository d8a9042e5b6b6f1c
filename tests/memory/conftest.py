"""One vm of each kind, small pages, closed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ballast.core.units import KiB
from ballast.memory.vm import Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm

PAGE = 64 * KiB
N_PAGES = 32


@pytest.fixture
def memfd() -> Iterator[MemfdVm]:
    made = MemfdVm(PAGE, N_PAGES)
    yield made
    made.close()


@pytest.fixture(params=["null", "memfd"])
def vm(request: pytest.FixtureRequest) -> Iterator[Vm]:
    made: Vm = NullVm(PAGE, N_PAGES) if request.param == "null" else MemfdVm(PAGE, N_PAGES)
    yield made
    made.close()
