"""The LoRA kernels against float64, and to the bit against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ballast.bench.few_bits import few_bits
from ballast.core.errors import BrokenPromise
from ballast.kernels import lora, quantised, team
from ballast.kernels.lora import AdapterRows, LoraGroup, LoraMatrices, LoraTarget
from ballast.kernels.packed_delta import PackedMatrix
from ballast.kernels.quantised import PackedRows

F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Adapter:
    """A (rank, k), B transposed (rank, n)."""

    a: Tensor
    b: Tensor
    scale: float

    @classmethod
    def random(cls, k: int, n: int, rank: int, dtype: torch.dtype) -> Adapter:
        return cls(torch.randn(rank, k).to(dtype), torch.randn(rank, n).to(dtype), 2.0 / rank)

    @property
    def matrices(self) -> LoraMatrices:
        return LoraMatrices(self.a.data_ptr(), self.b.data_ptr(), len(self.a), self.scale)

    def of(self, x: Tensor) -> Tensor:
        return self.scale * (x.double() @ self.a.double().t()) @ self.b.double()


def target(adapters: list[Adapter | None], n: int, **columns: int) -> LoraTarget:
    return LoraTarget(n, tuple(a and a.matrices for a in adapters), **columns)


def expected(y: Tensor, x: Tensor, index: list[int], adapters: list[Adapter | None]) -> Tensor:
    """y with what each row's adapter adds, float64."""
    made = y.double().clone()
    for row, i in enumerate(index):
        adapter = adapters[i] if i >= 0 else None
        if adapter is not None:
            made[row] += adapter.of(x[row])
    return made


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """At two, work is shared however little there is."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(lora, "ALONE", 0)
    torch.manual_seed(0)
    yield request.param
    torch.set_num_threads(before)


INDEX = [0, 2, -1, 1, 0, 3, 1, 1, -1, 0, 1, 2, *[1] * 70, 0]
RANKS = (8, 3, 33)


@pytest.mark.parametrize(("k", "n"), [(64, 96), (37, 41), (5, 3), (160, 1100)])
@pytest.mark.parametrize(("act", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_rows_ranks_and_shapes(
    threads: int, k: int, n: int, act: torch.dtype, dtype: torch.dtype
) -> None:
    """Rows of four adapters, one of which has nothing here, and of none; strides of their own."""
    adapters: list[Adapter | None] = [Adapter.random(k, n, r, dtype) for r in RANKS]
    adapters.append(None)
    x = torch.randn(len(INDEX), k + 9)[:, :k].to(act)
    y = torch.randn(len(INDEX), n + 7).to(act)[:, :n]
    reference = expected(y, x, INDEX, adapters)
    before = y.clone()
    LoraGroup(k, [target(adapters, n)], dtype).add(AdapterRows(INDEX), x, y)
    tolerance = 1e-4 if act == F32 else 1e-2
    assert torch.allclose(y.double(), reference, rtol=tolerance, atol=tolerance)
    untouched = [i < 0 or adapters[i] is None for i in INDEX]
    assert torch.equal(y[untouched], before[untouched])
    changed = (y != before).any(1)
    assert changed.tolist() == [not u for u in untouched]


@pytest.mark.parametrize(("act", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_a_row_is_the_same_in_any_batch(threads: int, act: torch.dtype, dtype: torch.dtype) -> None:
    k, n = 75, 83
    adapters: list[Adapter | None] = [Adapter.random(k, n, r, dtype) for r in RANKS]
    x, y = torch.randn(len(INDEX), k).to(act), torch.randn(len(INDEX), n).to(act)
    group = LoraGroup(k, [target(adapters, n)], dtype)
    index = [min(i, 2) for i in INDEX]
    together = y.clone()
    group.add(AdapterRows(index), x, together)
    for row, i in enumerate(index):
        alone = y[row : row + 1].clone()
        group.add(AdapterRows([i]), x[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])


def test_targets_of_one_input_in_one_output(threads: int) -> None:
    """Queries, keys and values side by side; then gate and up in turns of 32 columns."""
    k, rows = 48, [1, -1, 0, 0, 1]
    x = torch.randn(5, k)
    sizes = [(64, 0), (32, 64), (35, 96)]
    parts = [[Adapter.random(k, n, r, F32) for r in (4, 7)] for n, _ in sizes]
    parts[1][0] = None  # type: ignore[call-overload]
    targets = [target(list(p), n, column=c) for p, (n, c) in zip(parts, sizes, strict=True)]
    y = torch.randn(5, 131)
    reference = torch.cat(
        [
            expected(y[:, c : c + n], x, rows, list(p))
            for p, (n, c) in zip(parts, sizes, strict=True)
        ],
        1,
    )
    LoraGroup(k, targets, F32).add(AdapterRows(rows), x, y)
    assert torch.allclose(y.double(), reference, atol=1e-5)

    n = 80
    both = [[Adapter.random(k, n, r, F32) for r in (4, 7)] for _ in range(2)]
    targets = [
        target(list(p), n, column=32 * i, block=32, block_step=64) for i, p in enumerate(both)
    ]
    y = torch.randn(5, 176)
    columns = torch.arange(n) // 32 * 64 + torch.arange(n) % 32
    whole = y.double().clone()
    for i, p in enumerate(both):
        at = columns + 32 * i
        whole[:, at] = expected(y[:, at], x, rows, list(p))
    LoraGroup(k, targets, F32).add(AdapterRows(rows), x, y)
    assert torch.allclose(y.double(), whole, atol=1e-5)


def test_tables_of_layers_share_a_job(threads: int) -> None:
    """As a program runs them: tables of two layers filled at once, inputs taken by index."""
    k, n, index, x_rows = 40, 64, [0, -1, 1], np.array([4, 0, 2])
    layers = [[Adapter.random(k, n, r, BF16) for r in (4, 9)] for _ in range(2)]
    groups = [LoraGroup(k, [target(list(layer), n)], BF16) for layer in layers]
    x, y = torch.randn(6, k), torch.randn(3, n)
    reference = y.double()
    for layer in layers:
        reference = expected(reference, x[x_rows], index, list(layer))
    made = np.stack([g.tables() for g in groups])
    rows = AdapterRows(index, x_rows)
    t = np.empty(max(g.scratch(rows.positions) for g in groups), np.float32)
    for _ in range(2):
        rows.place(made, (x.data_ptr(), k), (y.data_ptr(), n), t.ctypes.data)
        for layer_tables in made:
            for kernel, table in zip(lora.kernels(F32, BF16), layer_tables, strict=True):
                team.run(kernel, table.ctypes.data, threads)
        assert torch.allclose(y.double(), reference, atol=1e-4)
        for layer in layers:
            reference = expected(reference, x[x_rows], index, list(layer))


def test_no_rows_and_rows_of_no_adapter(threads: int) -> None:
    adapters: list[Adapter | None] = [Adapter.random(8, 8, 2, F32), None]
    group = LoraGroup(8, [target(adapters, 8)], F32)
    for index in ([], [-1, -1], [1, -1]):
        x, y = torch.randn(len(index), 8), torch.randn(len(index), 8)
        before = y.clone()
        group.add(AdapterRows(index), x, y)
        assert torch.equal(y, before)


def test_what_the_kernels_would_misread_is_refused() -> None:
    adapter = Adapter.random(8, 8, 2, F32)
    group = LoraGroup(8, [target([adapter], 8)], F32)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    rows = AdapterRows([0, 0])
    for bad in (x[:1], x[:, :7], x.to(BF16), torch.randn(8, 2).t()):
        with pytest.raises(BrokenPromise, match="input"):
            group.add(rows, bad, y)
    with pytest.raises(BrokenPromise, match="output"):
        group.add(rows, x, torch.randn(2, 9))
    with pytest.raises(BrokenPromise, match="multiples of 32"):
        LoraGroup(8, [target([adapter], 8, block=16, block_step=32)], F32)


def packed(n: int, k: int, bits: int) -> tuple[PackedMatrix, Tensor, Tensor]:
    """A random matrix (n, k) in few bits, its panels, and what it stands for."""
    found = few_bits(torch.randn(n, k), bits)
    scales = found.scales.float().repeat_interleave(32, 1)[:, :k]
    codes = (found.rounded / scales).nan_to_num().round()
    codes = codes.to(torch.int16) + (8 if bits == 4 else 0)
    rows = PackedRows((codes & 255).to(torch.uint8), found.scales)
    form = f"INT{bits}-BF16:32"
    panels = quantised.pack(rows, form, k)
    return PackedMatrix(panels.data_ptr(), form), panels, found.rounded


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_matrices_in_few_bits_beside_those_of_low_rank(threads: int, dtype: torch.dtype) -> None:
    k, n, blocks = 84, 100, {"block": 32, "block_step": 64}
    one, kept, whole = packed(n, k, 4)
    two, also, wider = packed(n, k, 8)
    low = Adapter.random(k, n, 3, dtype)
    targets = [
        LoraTarget(n, (None, None, low.matrices), 5, packed=(one, None, None)),
        LoraTarget(n, (None,) * 3, 128, **blocks, packed=(None, two, None)),
    ]
    group = LoraGroup(k, targets, dtype)
    assert group.width == 128 + 3 * 64 + 4
    index = [2, -1, 0, 1, 0, 2, 1, 1]
    x, y = torch.randn(8, k).to(dtype), torch.randn(8, 330).to(dtype)
    columns = torch.arange(n) // 32 * 64 + torch.arange(n) % 32 + 128
    expected = y.double().clone()
    for row, adapter in enumerate(index):
        if adapter == 0:
            expected[row, 5:105] += whole.double() @ x[row].double()
        elif adapter == 1:
            expected[row, columns] += wider.double() @ x[row].double()
        elif adapter == 2:
            expected[row, 5:105] += low.of(x[row])
    before = y.clone()
    group.add(AdapterRows(index), x, y[:, : group.width])
    near = {"rtol": 0, "atol": 1e-4} if dtype == F32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y.double(), expected, **near)
    assert torch.equal(y[1], before[1])
    alone = before[2:3].clone()
    group.add(AdapterRows([0]), x[2:3], alone[:, : group.width])
    assert torch.equal(alone[0], y[2])
    del kept, also


@pytest.mark.parametrize("bits", [4, 8])
def test_few_bits_are_within_half_a_step(bits: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(7, 100) * 1e-5
    matrix[2, :32] = 0.0
    found = few_bits(matrix, bits)
    words = [(found.packed >> i * bits) & (1 << bits) - 1 for i in range(32 // bits)]
    codes = torch.stack(words, -1).view(7, -1)[:, :100] - (1 << bits - 1)
    again = codes * found.scales.float().repeat_interleave(32, 1)[:, :100]
    assert torch.equal(again, found.rounded)
    step = matrix[:, :96].view(7, 3, 32).abs().amax(-1) / ((1 << bits - 1) - 1)
    error = (matrix - again)[:, :96].view(7, 3, 32).square().mean(-1).sqrt()
    assert (error <= 0.5 * step).all()
    assert torch.equal(again[2, :32], torch.zeros(32))
    assert torch.allclose(matrix[:, 96:], again[:, 96:], rtol=0.3, atol=2e-6)
