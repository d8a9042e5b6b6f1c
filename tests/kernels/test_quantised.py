"""Quantised panels: weights are those that are dequantised, to the bit, and rows independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.fleet.gguf_header import TYPES
from ballast.kernels import layer, linear, quantised, team
from ballast.kernels.panel_forms import FORMS, NUMBERS, packed_bytes, panel_bytes
from ballast.weights.gguf_blocks import dequantise
from benchmarks import gguf_files as gguf

K = 512


def matrix(name: str, n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Rows of blocks, and their elements as dequantised, float32."""
    raw = torch.frombuffer(bytearray(gguf.blocks(name, (n, K), seed)), dtype=torch.uint8)
    if name == "F16":
        return raw.view(n, -1), raw.view(torch.float16).float().view(n, K)
    return raw.view(n, -1), dequantise(raw, TYPES[gguf.NUMBERS[name]]).view(n, K)


def multiply(
    x: Tensor, packed: Tensor, name: str, n: int, *, mode: int = linear.STORE, threads: int = 2
) -> Tensor:
    width = n // 2 if mode >= linear.GATED else n
    out = torch.full((len(x), width), float("nan"))
    tables = quantised.tables(np.array([packed.data_ptr()]), n, K, name, mode=mode)
    linear.place(tables, len(x), (x.data_ptr(), K), (out.data_ptr(), width))
    team.run(quantised.kernel(), tables.ctypes.data, threads)
    return out


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_dequantised_to_the_bit(name: str) -> None:
    raw, weight = matrix(name, 130)
    packed = quantised.pack(raw, name, K)
    assert packed.nbytes == packed_bytes(name, 130, K)
    assert torch.equal(multiply(torch.eye(K), packed, name, 130).T, weight)


@pytest.mark.parametrize("name", FORMS)
def test_a_row_depends_on_itself_alone(name: str) -> None:
    raw, weight = matrix(name, 70)
    packed = quantised.pack(raw, name, K)
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(2))
    whole = multiply(x, packed, name, 70)
    torch.testing.assert_close(whole, x @ weight.T, rtol=1e-4, atol=1e-4)
    for first, rows in ((0, 1), (5, 2), (3, 7), (0, 14), (11, 29)):
        part = x[first : first + rows].clone()
        assert torch.equal(multiply(part, packed, name, 70, threads=1), whole[first : first + rows])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_gates_and_ups_are_interleaved(name: str) -> None:
    gates, gate = matrix(name, 40, 1)
    ups, up = matrix(name, 40, 2)
    packed = quantised.pack(linear.gated(gates, ups), name, K)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    found = multiply(x, packed, name, 80, mode=linear.GATED)
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_an_embedding(name: str) -> None:
    raw, weight = matrix(name, 130)
    packed = quantised.pack(raw, name, K)
    tokens = torch.tensor([129, 0, 64, 64, 5])
    out = torch.empty(len(tokens), K)
    tables = layer.tables(
        1,
        rows=len(tokens),
        width=K,
        source=packed.data_ptr(),
        source_row=panel_bytes(name, K),
        target=out.data_ptr(),
        target_row=K,
        index=tokens.data_ptr(),
        panel_form=NUMBERS[name],
        scale=layer.bits_of(2.0),
    )
    team.run(quantised.embed_kernel(), tables.ctypes.data, 2)
    assert torch.equal(out, 2 * weight[tokens])


@pytest.mark.parametrize("name", FORMS)
def test_scales_that_are_not_finite_are_found(name: str) -> None:
    raw, _ = matrix(name, 64)
    assert quantised.finite_scales(raw, name)
    at = gguf.scales_at(name)[-1]
    raw[63, at : at + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    assert not quantised.finite_scales(raw, name)


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(BrokenPromise, match="not whole blocks of Q4_K"):
        quantised.pack(torch.zeros(1, 18, dtype=torch.uint8), "Q4_K", 32)
