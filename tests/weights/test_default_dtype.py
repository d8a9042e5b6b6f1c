"""A model is built in its dtype on one thread, and no other thread notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ballast.weights.default_dtype import DefaultDtype
from ballast.weights.meta_module import build_module
from benchmarks.tiny import tiny

MADE: dict[str, Callable[[], Tensor]] = {
    "a parameter": lambda: nn.Linear(2, 3).weight,
    "ones": lambda: torch.ones(3),
    "of a number": lambda: torch.tensor(0.5),
    "of numbers": lambda: torch.tensor([[1, 2.5]]),
    "of integers": lambda: torch.tensor([1, 2]),
    "full": lambda: torch.full((2,), 1.5),
    "full of integers": lambda: torch.full((2,), 1),
    "a range": lambda: torch.arange(0, 1, 0.25),
    "a range of integers": lambda: torch.arange(4),
    "a quotient of integers": lambda: torch.arange(4) / 4,
    "a logarithm of integers": lambda: torch.log(torch.arange(1, 4)),
    "named": lambda: torch.zeros(2, dtype=torch.float32),
    "asked for": lambda: torch.arange(4).float() / 2,
    "converted": lambda: torch.arange(4).to(torch.float32) + 1,
    "of an array": lambda: torch.as_tensor(np.zeros(3, np.float32)),
    "of tensors": lambda: torch.stack([torch.zeros(2, dtype=torch.float64)] * 2),
    "of itself": lambda: torch.ones_like(torch.zeros(2, dtype=torch.float32)),
}


@pytest.fixture
def default_restored() -> Any:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("what", MADE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_of_the_dtype_that_a_default_would_give(
    what: str, dtype: torch.dtype, default_restored: None
) -> None:
    with DefaultDtype(dtype):
        found = MADE[what]()
    torch.set_default_dtype(dtype)
    assert found.dtype == MADE[what]().dtype


def test_no_thread_notices_a_build_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once, each in the midst of the other, and a job beside them."""
    config = tiny("llama")
    seen: list[torch.dtype] = []
    both = threading.Barrier(2)
    make = nn.Embedding.__init__

    def together(self: nn.Embedding, *arguments: Any, **more: Any) -> None:
        both.wait(240)
        beside = threading.Thread(target=lambda: seen.append(torch.zeros(1).dtype))
        beside.start()
        beside.join()
        make(self, *arguments, **more)

    monkeypatch.setattr(nn.Embedding, "__init__", together)
    built: list[nn.Module] = []
    threads = [
        threading.Thread(target=lambda: built.append(build_module(config, torch.bfloat16)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [torch.float32] * 2
    assert torch.zeros(1).dtype == torch.float32
    for module in built:
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert module.config.dtype == torch.bfloat16
