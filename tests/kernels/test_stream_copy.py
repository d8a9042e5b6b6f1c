"""Copies that pass the caches by are copies, wherever they begin and end."""

from __future__ import annotations

import numpy as np
import pytest

from ballast.kernels.stream_copy import LEAST_BYTES, stream_copier


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, LEAST_BYTES, LEAST_BYTES + 64, LEAST_BYTES + 4099])
@pytest.mark.parametrize(("to", "at"), [(0, 0), (1, 0), (0, 3), (63, 17), (64, 8)])
def test_it_copies_just_these_bytes(n_bytes: int, to: int, at: int) -> None:
    source = np.random.default_rng(n_bytes).integers(0, 256, n_bytes + 256, dtype=np.uint8)
    target = np.full(n_bytes + 256, 77, np.uint8)
    stream_copier()(target.ctypes.data + to, source.ctypes.data + at, n_bytes)
    assert np.array_equal(target[to : to + n_bytes], source[at : at + n_bytes])
    assert (target[:to] == 77).all()
    assert (target[to + n_bytes :] == 77).all()
