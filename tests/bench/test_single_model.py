"""What `benchmarks.single_model` makes of its runs."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks.known_gemms import Gemms, Reader
from benchmarks.single_model import OURS, SIZES, VLLM, Phase, against_vllm
from benchmarks.turns import Run, Step


def phase(streams: int, ours: tuple[float, float], theirs: tuple[float, float]) -> Phase:
    """Of runs whose prefill and whose decode steps, nine of them, take so many seconds each."""
    runs = {}
    for name, (prefill, step) in ((OURS, ours), (VLLM, theirs)):
        steps = tuple(Step(0, step) for _ in range(9))
        runs[name] = [Run(streams, 128 * streams, 10 * streams, prefill + 9 * step, prefill, steps)]
    return Phase(SIZES[0], streams, cast(Gemms, None), cast(Reader, None), runs)


def test_a_peer_is_compared_in_decode_and_prefill_by_themselves() -> None:
    one = phase(1, ours=(1.0, 0.5), theirs=(4.0, 0.1))
    many = phase(16, ours=(2.0, 0.1), theirs=(3.0, 0.3))
    found = against_vllm([one, many])
    assert found["vs_vllm_cpu"] == pytest.approx((4.0 + 0.9) / (1.0 + 4.5))
    assert found["vs_vllm_cpu_decode"] == pytest.approx(3.0)
    assert found["vs_vllm_cpu_prefill"] == pytest.approx(1.5)
