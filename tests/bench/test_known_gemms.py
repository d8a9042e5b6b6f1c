"""The yardsticks of a decode step's speed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.known_gemms import (
    Gemms,
    Kernel,
    Matrix,
    kernels,
    onednn_packs,
    packed,
    panels,
    plain,
)


@pytest.mark.parametrize("kernel", [plain, packed, panels])
@pytest.mark.parametrize("rows", [1, 16])
def test_kernels_compute_the_product(kernel: Kernel, rows: int) -> None:
    if kernel not in kernels().values():
        pytest.skip("oneDNN packs no bfloat16 on this CPU")
    torch.manual_seed(rows)
    weight, x = torch.randn(192, 160).bfloat16(), torch.randn(rows, 160).bfloat16()
    product = kernel(weight, x)()
    assert isinstance(product, torch.Tensor)
    error = product.double() - x.double() @ weight.double().T
    # One rounding to bfloat16 of sums of about 160 ** 0.5.
    assert float(error.abs().max()) < 60 * 2**-8


def test_what_onednn_refuses_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor, rows: int) -> torch.Tensor:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support")
        return weight

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    onednn_packs.cache_clear()
    try:
        assert (onednn_packs(torch.float32), onednn_packs(torch.bfloat16)) == (True, False)
        assert kernels().keys() == {"plain", "panels"}
        assert Gemms((Matrix("o", 64, 64, 2),), 1).times.keys() == {"plain", "panels"}
    finally:
        onednn_packs.cache_clear()


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
