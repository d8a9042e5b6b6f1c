"""Linear layers on packed weights against float64, and against themselves in other batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels import team, vector_code
from ballast.kernels.linear import (
    ADD,
    GATED,
    GATED_ERF,
    GATED_TANH,
    gate_kernel,
    gate_tables,
    gated,
    linear,
    pack,
    packed_bytes,
    packed_shape,
    place,
    rows,
    unpack,
)
from ballast.kernels.linear_code import DOTS, PANEL
from tests.effort import tries

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def gate(gate_up: torch.Tensor, out: torch.Tensor, *, interleaved: bool, mode: int = GATED) -> None:
    """silu(gate) * up into `out`, by the kernel that takes what was stored."""
    made = gate_tables(1, out.shape[1], interleaved=interleaved, mode=mode)
    x = (gate_up.data_ptr(), gate_up.stride(0))
    place(made, len(out), x, (out.data_ptr(), out.stride(0)))
    team.run(gate_kernel(gate_up.dtype), made.ctypes.data, torch.get_num_threads())


def matrix(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Weights that keep outputs at the size of inputs."""
    return (torch.randn(n, k) / k**0.5).to(dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """The product in float64, of inputs rounded as the kernel of this CPU rounds them."""
    if DOTS and weight.dtype == torch.bfloat16:
        x = x.bfloat16()
    return x.double() @ weight.double().T


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@each_dtype
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 32), (70, 33), (200, 16), (129, 95)])
def test_panels_hold_the_matrix(n: int, k: int, dtype: torch.dtype) -> None:
    weight = matrix(n, k, dtype)
    packed = pack(weight)
    assert packed.shape == packed_shape(n, k, dtype)
    assert packed.dtype == dtype
    assert packed.is_contiguous()
    assert packed.nbytes == packed_bytes(n, k, dtype)
    assert packed.count_nonzero() == weight.count_nonzero()
    j, i = n - 1, k - 1
    if dtype == torch.float32:
        assert packed[j // 64, i, j % 64] == weight[j, i]
    else:
        assert packed[j // 64, i // 2, j % 64, i % 2] == weight[j, i]
    assert torch.equal(unpack(packed, n, k), weight)
    ids = torch.randint(n, (7,))
    assert torch.equal(rows(packed, n, k, ids), weight[ids])


@settings(max_examples=tries(25, all=80))
@given(
    dtype=st.sampled_from(DTYPES),
    n=st.integers(1, 300),
    k=st.integers(1, 700),
    m=st.integers(0, 40),
    biased=st.booleans(),
)
def test_equals_float64(dtype: torch.dtype, n: int, k: int, m: int, biased: bool) -> None:
    weight, x = matrix(n, k, dtype), torch.randn(m, k)
    bias = torch.randn(n) if biased else None
    expected = exact(x, weight) + (0 if bias is None else bias.double())
    close(linear(x, pack(weight), n, k, bias), expected)


@each_dtype
def test_many_rows_and_strides(dtype: torch.dtype) -> None:
    """More rows and inputs than one chunk has; inputs and outputs within wider rows."""
    n, k, m = 150, 1500, 300
    weight, x = matrix(n, k, dtype), torch.randn(m, k + 5)[:, 3 : k + 3]
    wide = torch.full((m, n + 20), 7.0)
    linear(x, pack(weight), n, k, out=wide[:, 10 : n + 10])
    close(wide[:, 10 : n + 10], exact(x, weight))
    assert (wide[:, :10] == 7.0).all()
    assert (wide[:, n + 10 :] == 7.0).all()


@each_dtype
@pytest.mark.parametrize(("k", "m"), [(2000, 70), (20_000, 1), (20_000, 40)])
def test_items_whose_inputs_fill_the_buffer_or_do_not_fit(
    k: int, m: int, dtype: torch.dtype
) -> None:
    """Several panels share what is copied once; the rows of each item are its own."""
    n = 200
    weight, x = matrix(n, k, dtype), torch.randn(m, k)
    packed = pack(weight)
    found = linear(x, packed, n, k)
    close(found, exact(x, weight))
    assert torch.equal(found[-1:], linear(x[-1:], packed, n, k))


@each_dtype
@pytest.mark.parametrize("half", [32, 37, 96, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_gated(dtype: torch.dtype, half: int, biased: bool) -> None:
    k, m = 75, 11
    gate, up, x = matrix(half, k, dtype) * 10, matrix(half, k, dtype), torch.randn(m, k)
    x[0] *= 30  # exp of such gates overflows or vanishes
    g, u = exact(x, gate), exact(x, up)
    bias = None
    if biased:
        first, second = torch.randn(half), torch.randn(half)
        g, u, bias = g + first, u + second, gated(first, second)
    packed = pack(gated(gate, up))
    assert packed.shape == packed_shape(2 * half, k, dtype)
    found = linear(x, packed, 2 * half, k, bias, mode=GATED)
    expected = torch.nn.functional.silu(g) * u
    size = expected.abs().amax(1, keepdim=True)
    close(found / size, expected / size)


def gelu_by_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


GELUS = {GATED_ERF: torch.nn.functional.gelu, GATED_TANH: gelu_by_tanh}


@each_dtype
@pytest.mark.parametrize("half", [32, 37, 96])
@pytest.mark.parametrize("mode", GELUS, ids=["erf", "tanh"])
def test_gated_by_gelu(dtype: torch.dtype, half: int, mode: int) -> None:
    """Gates from those that are as good as zero to those that pass whole, and the same stored."""
    k, m = 75, 11
    gates, ups, x = matrix(half, k, dtype), matrix(half, k, dtype), torch.randn(m, k)
    x[0] *= 30
    x[1] *= 1e-3
    packed = pack(gated(gates, ups))
    found = linear(x, packed, 2 * half, k, mode=mode)
    expected = GELUS[mode](exact(x, gates)) * exact(x, ups)
    size = expected.abs().amax(1, keepdim=True)
    close(found / size, expected / size)
    out = torch.full((m, half), 7.0)
    gate(linear(x, packed, PANEL * len(packed), k), out, interleaved=True, mode=mode)
    assert torch.equal(out, found)


@pytest.mark.parametrize("mode", GELUS, ids=["erf", "tanh"])
def test_gelus_are_as_near_as_float32_is(mode: int) -> None:
    """Over all gates that matter: 1e-6 of the largest of 1 and the gate, next to float64."""
    gates = torch.linspace(-12, 12, 4800)
    out = torch.empty(1, 4800)
    gate(torch.cat([gates, torch.ones(4800)])[None], out, interleaved=False, mode=mode)
    exactly = GELUS[mode](gates.double())
    assert ((out[0] - exactly).abs() / gates.abs().clamp(min=1)).max() < 1e-6


@each_dtype
@pytest.mark.parametrize("half", [32, 37, 96])
def test_what_was_stored_is_gated_to_the_same_bits(dtype: torch.dtype, half: int) -> None:
    k, m = 75, 11
    packed = pack(gated(matrix(half, k, dtype) * 10, matrix(half, k, dtype)))
    x = torch.randn(m, k)
    x[0] *= 30
    at_once = linear(x, packed, 2 * half, k, mode=GATED)
    stored = linear(x, packed, PANEL * len(packed), k)
    out = torch.full((m, half + 3), 7.0)
    gate(stored, out[:, :half], interleaved=True)
    assert torch.equal(out[:, :half], at_once)
    assert (out[:, half:] == 7.0).all()
    apart = stored.view(m, -1, 2, PANEL // 2).transpose(1, 2).reshape(m, 2, -1)[:, :, :half]
    gate(apart.flatten(1).contiguous(), out[:, :half], interleaved=False)
    assert torch.equal(out[:, :half], at_once)


@each_dtype
@pytest.mark.parametrize("m", [1, 9, 150])
def test_indices_and_scale(dtype: torch.dtype, m: int) -> None:
    n, k, total = 90, 1100, 200
    weight, x = matrix(n, k, dtype), torch.randn(total, k)
    take, put = torch.randint(total, (m,)), torch.randperm(total)[:m]
    scale, bias = torch.rand(m), torch.randn(n)
    out = torch.randn(total, n)
    expected = out.double()
    expected[put] += scale[:, None] * (exact(x[take], weight) + bias)
    packed = pack(weight)
    kwargs = {"x_index": take, "out_index": put}
    linear(x, packed, n, k, bias, out, mode=ADD, scale=scale, **kwargs)
    close(out, expected)
    expected[put] = exact(x[take], weight)
    linear(x, packed, n, k, None, out, **kwargs)
    close(out, expected)
    expected += exact(x, weight)
    linear(x, packed, n, k, None, out, mode=ADD)
    close(out, expected)


@each_dtype
@pytest.mark.parametrize("mode", ["store", "add", "gated"])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, mode: str) -> None:
    """Nor on the number of threads: bit by bit."""
    n, k, m = 200, 1400, 300
    packed, x = pack(matrix(n, k, dtype)), torch.randn(m, k)
    base = torch.randn(m, n)

    def run(x: Tensor, before: Tensor) -> Tensor:
        if mode == "add":
            return linear(x, packed, n, k, None, before.clone(), mode=ADD)
        return linear(x, packed, n, k, mode=GATED if mode == "gated" else 0)

    threads = torch.get_num_threads()
    whole = run(x, base)
    for count in (*range(1, 20), 126, 299):
        first = m - count
        assert torch.equal(run(x[first:], base[first:]), whole[first:]), count
    for used in (1, 2, 3):
        torch.set_num_threads(used)
        try:
            assert torch.equal(run(x, base), whole)
            assert torch.equal(run(x[:5], base[:5]), whole[:5])
        finally:
            torch.set_num_threads(threads)


@each_dtype
def test_what_lies_beyond_the_inputs_is_not_read(dtype: torch.dtype) -> None:
    """NaN next to odd inputs must not reach a sum, nor what another row left in the buffer."""
    n, k = 64, 257
    weight = matrix(n, k, dtype)
    x = torch.full((3, k + 1), torch.nan)
    x[:, :k] = torch.randn(3, k)
    close(linear(x[:, :k], pack(weight), n, k), exact(x[:, :k], weight))
    x[1, :k] = torch.inf
    found = linear(x[:, :k], pack(weight), n, k)
    close(found[::2], exact(x[::2, :k], weight))


def test_refusals() -> None:
    packed, x = pack(torch.randn(70, 40)), torch.randn(4, 40)
    with pytest.raises(BrokenPromise, match="panels"):
        linear(x, packed, 70, 60)
    with pytest.raises(BrokenPromise, match="inputs"):
        linear(x.T.contiguous().T, packed, 70, 40)
    with pytest.raises(BrokenPromise, match="inputs"):
        linear(x.bfloat16(), packed, 70, 40)
    with pytest.raises(BrokenPromise, match="bias"):
        linear(x, packed, 70, 40, torch.randn(64))
    with pytest.raises(BrokenPromise, match="output"):
        linear(x, packed, 70, 40, mode=ADD)
    with pytest.raises(BrokenPromise, match="rows"):
        linear(x, packed, 70, 40, out=torch.empty(3, 70))
    with pytest.raises(BrokenPromise, match="float16"):
        packed_shape(4, 4, torch.float16)


def test_instructions_are_those_that_the_compiler_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NUMBA_CPU_FEATURES` and `NUMBA_CPU_NAME=generic` hide what the CPU has."""
    for features, has in (("", False), ("+avx2,+avx512f", False), ("+avx512f,+avx512bf16", True)):
        monkeypatch.setattr(vector_code.config, "CPU_FEATURES", features)
        assert vector_code.compiles_for("avx512bf16") is has
