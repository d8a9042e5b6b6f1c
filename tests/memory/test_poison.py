"""The checking mode of the tests: stale use of a page that KV has given back is found."""

from __future__ import annotations

import numpy as np
import pytest

from ballast.core.units import KiB
from ballast.memory.pool import Pool
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm


def test_stale_reads_are_nan_and_stale_writes_are_found(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 4)
    pages = pool.allocate("kv:m", 2)
    assert isinstance(pages, tuple)
    stale = [array_at(memfd.window.address(p), (memfd.page_bytes // 4,), np.float32) for p in pages]
    for view in stale:
        view[:] = 1.0
    pool.give_back("kv:m", pages)
    assert all(np.isnan(view).all() for view in stale)
    assert pool.allocate("kv:other", 1, near=pages[0] - 1) is not None
    stale[0][7] = stale[1][7] = 2.0
    with pytest.raises(AssertionError, match="written on while nobody had it"):
        pool.allocate("weights:m", 3)
    assert memfd.page_bytes >= 4 * KiB
