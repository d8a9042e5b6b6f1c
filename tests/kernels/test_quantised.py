"""Quantised panels: weights are those that are dequantised, to the bit, and rows independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.fleet.gguf_header import TYPES
from ballast.kernels import layer, linear, quantised, team
from ballast.kernels.panel_forms import (
    E2M1,
    EXPONENTS,
    FORMS,
    form_name,
    form_of_name,
    number_of,
    packed_bytes,
    panel_bytes,
    rounded,
)
from ballast.kernels.quantised import PackedRows
from ballast.weights.gguf_blocks import dequantise, take_apart
from benchmarks import gguf_files as gguf

K = 512


GGUF = [name for name, form in FORMS.items() if not form.scale]
OTHERS = ["INT4-BF16:64", "INT4Z-F16:128", "INT4Z-BF16:32", "INT8-F32:512", "INT8Z-F16:64"]
OTHERS += ["FP8-F32:128", "NF4-F32:64", "FP4-F32:64", "MXFP4", "INT4-F32:64"]
NAMES = [*GGUF, *OTHERS, "INT8Z-BF16:64+an order"]
SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def matrix(name: str, n: int, seed: int = 1) -> tuple[PackedRows, Tensor]:
    """Rows of a form, and their elements as dequantised, float32."""
    if name in OTHERS or "+" in name:
        return other(name, n, seed)
    raw = torch.frombuffer(bytearray(gguf.blocks(name, (n, K), seed)), dtype=torch.uint8)
    rows = take_apart(raw.view(n, -1), name)
    if name == "F16":
        return rows, raw.view(torch.float16).float().view(n, K)
    return rows, dequantise(raw, TYPES[gguf.NUMBERS[name]]).view(n, K)


def other(name: str, n: int, seed: int) -> tuple[PackedRows, Tensor]:
    draw, form = torch.Generator().manual_seed(seed), form_of_name(name)
    spans = K // form.span
    codes = torch.randint(0, 1 << form.bits, (n, K), generator=draw, dtype=torch.uint8)
    if form.is_float8:
        codes[codes & 127 == 127] = 5
    if form.scale == EXPONENTS:
        scales = torch.randint(119, 124, (n, spans), generator=draw, dtype=torch.uint8)
    else:
        scales = (torch.rand(n, spans, generator=draw) / 16 + 0.01).to(SCALES[form.scale])
    zeros = torch.randint(0, 1 << form.bits, (n, spans), generator=draw, dtype=torch.uint8)
    order = torch.randperm(K, generator=draw).int() if form.is_ordered else None
    rows = PackedRows(codes, scales, zeros if form.has_zeros else None, order=order)
    return rows, quantised.dequantise(rows, name)


def multiply(
    x: Tensor, packed: Tensor, name: str, n: int, *, mode: int = linear.STORE, threads: int = 2
) -> Tensor:
    width = n // 2 if mode >= linear.GATED else n
    out = torch.full((len(x), width), float("nan"))
    tables = quantised.tables(np.array([packed.data_ptr()]), n, K, name, mode=mode)
    linear.place(tables, len(x), (x.data_ptr(), K), (out.data_ptr(), width))
    team.run(quantised.kernel(name), tables.ctypes.data, threads)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_dequantised_to_the_bit(name: str) -> None:
    rows, weight = matrix(name, 130)
    packed = quantised.pack(rows, name, K)
    assert packed.nbytes == packed_bytes(name, 130, K)
    assert torch.equal(multiply(torch.eye(K), packed, name, 130).T, weight)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_depends_on_itself_alone(name: str) -> None:
    rows, weight = matrix(name, 70)
    packed = quantised.pack(rows, name, K)
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(2))
    whole = multiply(x, packed, name, 70)
    torch.testing.assert_close(whole, x @ weight.T, rtol=1e-4, atol=1e-4)
    for first, rows in ((0, 1), (5, 2), (3, 7), (0, 14), (11, 29)):
        part = x[first : first + rows].clone()
        assert torch.equal(multiply(part, packed, name, 70, threads=1), whole[first : first + rows])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "INT4Z-F16:128", "FP8-F32:128"])
def test_gates_and_ups_are_interleaved(name: str) -> None:
    gates, gate = matrix(name, 40, 1)
    ups, up = matrix(name, 40, 2)
    packed = quantised.pack(quantised.gated(quantised.stacked([gates, ups])), name, K)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    found = multiply(x, packed, name, 80, mode=linear.GATED)
    expected = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_rows_of_an_embedding(name: str) -> None:
    rows, weight = matrix(name, 130)
    packed = quantised.pack(rows, name, K)
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
        panel_form=number_of(name),
        scale=layer.bits_of(2.0),
    )
    team.run(quantised.embed_kernel(), tables.ctypes.data, 2)
    assert torch.equal(out, 2 * weight[tokens])


@pytest.mark.parametrize("name", NAMES)
def test_scales_that_are_not_finite_are_found(name: str) -> None:
    rows, _ = matrix(name, 64)
    assert quantised.is_finite(rows, name)
    rows.scales[63, -1] = float("inf") if rows.scales.is_floating_point() else 255
    assert not quantised.is_finite(rows, name)


def test_codes_that_are_not_finite_are_found() -> None:
    rows, _ = matrix("FP8-F32:128", 64)
    rows.codes[63, 1] = 255
    assert not quantised.is_finite(rows, "FP8-F32:128")


def test_powers_of_two_are_those_of_all_exponents() -> None:
    codes = torch.arange(70 * K, dtype=torch.int32).view(70, K) % 16
    exponents = (torch.arange(70 * K // 32) % 253).to(torch.uint8).view(70, -1)
    rows = PackedRows(codes.to(torch.uint8), exponents)
    powers = torch.tensor([2.0 ** (e - 127) for e in range(253)], dtype=torch.float64)
    expected = torch.tensor(E2M1, dtype=torch.float64)[codes.long()].view(70, -1, 32)
    expected = (expected * powers[exponents.long()][..., None]).view(70, K)
    assert quantised.is_finite(rows, "MXFP4")
    packed = quantised.pack(rows, "MXFP4", K)
    found = multiply(torch.eye(K), packed, "MXFP4", 70).T
    assert torch.equal(found.double(), expected)


def test_powers_of_two_beyond_float32_are_found_by_their_codes() -> None:
    rows, _ = matrix("MXFP4", 64)
    rows.scales[5, 3] = 253
    rows.codes[5, 96:128] = 5  # 3 x 2^126
    assert quantised.is_finite(rows, "MXFP4")
    rows.codes[5, 100] = 6  # 4 x 2^126
    assert not quantised.is_finite(rows, "MXFP4")


def test_rows_of_no_whole_span_end_with_zeros() -> None:
    name, k = form_name("INT8", "F32", 64), 100
    codes = torch.randint(0, 256, (70, k), dtype=torch.uint8)
    rows = PackedRows(codes, torch.rand(70, 2))
    packed = quantised.pack(rows, name, k)
    out = torch.empty(k, 70)
    tables = quantised.tables(np.array([packed.data_ptr()]), 70, k, name)
    eye = torch.eye(k)
    linear.place(tables, k, (eye.data_ptr(), k), (out.data_ptr(), 70))
    team.run(quantised.kernel(name), tables.ctypes.data, 2)
    assert torch.equal(out.T, quantised.dequantise(rows, name))


def test_an_order_of_inputs_is_needed_where_the_form_has_one() -> None:
    rows = matrix("INT8Z-F16:64", 64)[0]
    with pytest.raises(BrokenPromise, match="without the order"):
        quantised.pack(rows, "INT8Z-F16:64+x", K)


def rounded_rows(x: Tensor) -> Tensor:
    """Rows of inputs as they are rounded to int8, in blocks of 32."""
    blocks = x.view(len(x), -1, 32)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    return ((blocks / scales).round() * scales).view(x.shape)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "INT4-BF16:64", "INT4Z-F16:128"])
def test_activations_in_int8(name: str) -> None:
    rows, weight = matrix(name, 70)
    packed = quantised.pack(rows, name, K)
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(2))
    x[7, 64:96] = 0
    x[8, 64:96] = 1e-40
    form = rounded(name, K)
    whole = multiply(x, packed, form, 70)
    expected = rounded_rows(x).nan_to_num() @ weight.T
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(whole, multiply(x, packed, name, 70))
    for first, many in ((0, 1), (5, 2), (7, 7), (11, 29)):
        part = x[first : first + many].clone()
        assert torch.equal(multiply(part, packed, form, 70, threads=1), whole[first : first + many])


def test_inputs_in_an_order_are_rounded_in_it() -> None:
    name = "INT4Z-F16:64+order"
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (64, K), generator=draw, dtype=torch.uint8)
    zeros = torch.full((64, K // 64), 8, dtype=torch.uint8)
    order = torch.randperm(K, generator=draw).int()
    rows = PackedRows(codes, torch.ones(64, K // 64).half(), zeros, order=order)
    x = torch.randn(3, K, generator=draw)
    turned = rounded_rows(x[:, order.long()].contiguous())
    expected = turned @ (codes.float() - 8).T
    found = multiply(x, quantised.pack(rows, name, K), rounded(name, K), 64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_forms_without_products_of_int8_stay_as_they_are() -> None:
    assert rounded("FP8-F32:128", K) == "FP8-F32:128"
    assert rounded("Q4_0", 1 << 20) == "Q4_0"
