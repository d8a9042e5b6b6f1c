"""What measures adapters on a GPU, as far as that goes without one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu_lora


class OnHost:
    """Implements `Timed`."""

    device = torch.device("cpu")

    def seconds(self, work: Callable[[], object], times: int) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun


def test_every_rank_and_batch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lora, "CHUNKS", {"prefill_70_of_4": (70, 4)})
    found = gpu_lora.measure(OnHost(), ((48, (32, 16)), (16, (8,))), lambda work: work, 1)
    assert len(found) == len(gpu_lora.RANKS) * 4
    assert all(figure > 0 for case in found.values() for figure in case.values())


def test_rows_take_turns() -> None:
    rows = gpu_lora.rows_of(32, 8, True, torch.device("cpu"))
    assert rows.job == [(4 * i, 4, i) for i in range(8)]
