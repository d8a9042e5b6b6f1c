"""The yardsticks of a decode step's speed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.known_gemms import KERNELS, Gemms, Kernel, Matrix, single


@pytest.mark.parametrize("kernel", [*KERNELS.values(), single])
@pytest.mark.parametrize("rows", [1, 16])
def test_kernels_compute_the_product(kernel: Kernel, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(192, 160).bfloat16(), torch.randn(rows, 160).bfloat16()
    product = kernel(weight, x)()
    assert isinstance(product, torch.Tensor)
    error = product.double() - x.double() @ weight.double().T
    # One rounding to bfloat16 of sums of about 160 ** 0.5.
    assert float(error.abs().max()) < 60 * 2**-8


def test_a_step_takes_the_fastest_kernel_of_each_matrix() -> None:
    matrices = (Matrix("o", 64, 64, 2), Matrix("head", 128, 64, 1))
    calls: list[tuple[int, ...]] = []

    def counted(weight: torch.Tensor, x: torch.Tensor) -> object:
        return lambda: calls.append(tuple(weight.shape))

    gemms = Gemms(matrices, 1, {"a": counted, "b": counted})  # type: ignore[dict-item]
    del calls[:]
    gemms.measure(0.0)
    assert calls == [(64, 64), (64, 64), (128, 64)] * 2
    gemms.times = {"a": {"o": [1.0, 9.0, 2.0], "head": [5.0, 5.0, 5.0]}}
    gemms.times["b"] = {"o": [3.0, 3.0, 3.0], "head": [4.0, 1.0, 4.0]}
    assert gemms.fastest() == {"o": "a", "head": "b"}
    assert gemms.sums() == [5.0, 10.0, 6.0]
