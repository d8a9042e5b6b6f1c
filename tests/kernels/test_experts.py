"""Experts against float64, and against themselves in other batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels import experts, linear, quantised, team
from ballast.kernels.experts import ExpertBuffers, Experts, Routing, StackedMatrices
from ballast.kernels.linear_code import DOTS
from ballast.kernels.panel_forms import packed_bytes
from ballast.kernels.quantised import PackedRows
from ballast.memory import syscalls
from ballast.memory.tensor import tensor_at

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@dataclass
class Mixture:
    """Random weights of one layer."""

    width: int
    inner: int
    n: int
    routing: Routing
    dtype: torch.dtype
    router: Tensor = field(init=False)
    gate_up: Tensor = field(init=False)
    down: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.width + self.n)

        def matrix(*shape: int) -> Tensor:
            drawn: Tensor = 2 * torch.randn(shape) / shape[-1] ** 0.5
            return drawn.to(self.dtype)

        self.router = matrix(self.n, self.width)
        self.gate_up = matrix(self.n, 2 * self.inner, self.width)
        self.down = matrix(self.n, self.width, self.inner)

    def run(self, x: Tensor, out: Tensor, threads: int = 1) -> list[int]:
        """Add to `out` (rows, width) what the experts make of x; how many rows each had."""
        gated = [linear.gated(m[: self.inner], m[self.inner :]) for m in self.gate_up]
        gate_ups, downs = [linear.pack(m) for m in gated], [linear.pack(m) for m in self.down]
        rows = len(x)
        memory = [
            np.full(n // 4, -1, np.int32)
            for n in experts.sizes(rows, self.routing.top_k, self.width, self.inner)
        ]
        layer = Experts(
            np.array([self.router.data_ptr()]),
            np.array([[p.data_ptr() for p in gate_ups]]),
            np.array([[p.data_ptr() for p in downs]]),
            self.width,
            self.inner,
            self.routing,
            self.dtype,
            ExpertBuffers(x.data_ptr(), out.data_ptr(), *(m.ctypes.data for m in memory)),
            rows,
        )
        layer.fill(rows, 1 if rows < 9 else 4)
        table = layer.tables.ctypes.data
        operations = np.array([[k, table] for k in experts.kernels(self.dtype)])
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            team.Program(operations).run(threads)
        finally:
            torch.set_num_threads(before)
        return [int(n) for n in layer.counts[0]]

    def exact(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """What they make of x in float64, and how many rows each has."""
        x = x.double()
        probabilities = (x @ self.router.double().T).softmax(-1)
        shares, chosen = probabilities.topk(self.routing.top_k)
        if self.routing.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for row, (of_row, ids) in enumerate(zip(shares, chosen.tolist(), strict=True)):
            for share, e in zip(of_row, ids, strict=True):
                gate, up = (self.gate_up[e].double() @ self.taken(x[row])).chunk(2)
                gated = torch.nn.functional.silu(gate) * up
                made = self.down[e].double() @ self.taken(gated)
                total[row] += share * made
        return total, torch.bincount(chosen.flatten(), minlength=self.n).tolist()

    def taken(self, x: Tensor) -> Tensor:
        """Inputs as experts' matrices take them: rounded where these are multiplied by dots."""
        return x.to(self.dtype).double() if DOTS else x

    @property
    def tolerance(self) -> float:
        """Of a sum; where float32 and float64 may round an input to neighbours, of one of those."""
        return 2e-3 if DOTS and self.dtype == torch.bfloat16 else 1e-4


SHAPES = [
    Routing(1, normalised=False),
    Routing(2, normalised=True),
    Routing(5, normalised=False),
]


@each_dtype
@pytest.mark.parametrize("routing", SHAPES, ids=lambda r: f"top{r.top_k}")
@pytest.mark.parametrize(("width", "inner", "n"), [(64, 32, 5), (70, 33, 9), (33, 150, 67)])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_equals_float64(
    width: int, inner: int, n: int, rows: int, routing: Routing, dtype: torch.dtype
) -> None:
    """From fewer rows than experts to several chunks of rows for one."""
    mixture = Mixture(width, inner, n, routing, dtype)
    x, before = torch.randn(rows, width), torch.randn(rows, width)
    out = before.clone()
    counts = mixture.run(x, out)
    made, expected = mixture.exact(x)
    assert counts == expected
    assert made.std() > 0.1
    torch.testing.assert_close(
        (out - before).double(), made, rtol=mixture.tolerance, atol=mixture.tolerance
    )


@each_dtype
def test_a_row_depends_on_itself_alone(dtype: torch.dtype) -> None:
    """To the bit: alone, among others, elsewhere among them, and with more threads."""
    mixture = Mixture(96, 40, 8, Routing(3, normalised=True), dtype)
    x = torch.randn(50, 96)
    whole = torch.zeros(50, 96)
    mixture.run(x, whole)
    for rows in ([0], [7], [49, 3, 21], list(range(49, -1, -1))):
        some = torch.zeros(len(rows), 96)
        mixture.run(x[rows], some, threads=2)
        assert torch.equal(some, whole[rows])


def test_of_equal_experts_the_first_is_taken() -> None:
    mixture = Mixture(64, 32, 6, Routing(2, normalised=False), torch.float32)
    mixture.router[:] = mixture.router[0].clone()
    x = torch.randn(4, 64)
    assert mixture.run(x, torch.zeros(4, 64)) == [4, 4, 0, 0, 0, 0]


def test_logits_beyond_the_range_of_exp() -> None:
    """One expert has all the share, and those that have none are still different experts."""
    mixture = Mixture(64, 32, 4, Routing(3, normalised=True), torch.float32)
    mixture.router *= 1e4
    x = torch.randn(5, 64)
    out = torch.zeros(5, 64)
    counts = mixture.run(x, out)
    assert sum(counts) == 15
    assert max(counts) <= 5
    first = (x @ mixture.router.T).argmax(1)
    for row, e in enumerate(first.tolist()):
        gate, up = (mixture.gate_up[e] @ x[row]).chunk(2)
        made = mixture.down[e] @ (torch.nn.functional.silu(gate) * up)
        torch.testing.assert_close(out[row], made, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_goes_to_some_experts() -> None:
    """A job with such a row ends, and its other rows are what they are alone."""
    mixture = Mixture(64, 32, 6, Routing(2, normalised=True), torch.float32)
    x = torch.randn(3, 64)
    alone, among = torch.zeros(1, 64), torch.zeros(3, 64)
    mixture.run(x[2:], alone)
    x[0] = float("nan")
    assert sum(mixture.run(x, among)) == 6
    assert torch.equal(among[2:], alone)


class Stack:
    """Random matrices (outputs, inputs) in MXFP4, each on pages of its own."""

    def __init__(self, n: int, outputs: int, inputs: int) -> None:
        draw = torch.Generator().manual_seed(n)
        self.shape, self.n_bytes = (n, outputs, inputs), packed_bytes("MXFP4", outputs, inputs)
        self.each = -(-self.n_bytes // syscalls.PAGESIZE) * syscalls.PAGESIZE
        flags = syscalls.MAP_PRIVATE | syscalls.MAP_ANONYMOUS
        write = syscalls.PROT_READ | syscalls.PROT_WRITE
        self.base = syscalls.mmap(0, n * self.each, write, flags)
        self.weights = []
        for i in range(n):
            codes = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
            exponents = torch.randint(118, 124, (outputs, inputs // 32), generator=draw)
            rows = PackedRows(codes, exponents.to(torch.uint8))
            self.weights.append(quantised.dequantise(rows, "MXFP4"))
            panels = quantised.pack(rows, "MXFP4", inputs)
            tensor_at(self.base + i * self.each, panels.shape, panels.dtype).copy_(panels)
        at = self.base + self.each * np.arange(n)
        self.matrices = StackedMatrices(at, outputs, inputs, "MXFP4")

    def forbid(self, kept: set[int]) -> None:
        """From now on whoever reads another matrix than these dies."""
        for i in range(len(self.weights)):
            if i not in kept:
                syscalls.mprotect(self.base + i * self.each, self.each, syscalls.PROT_NONE)

    def close(self) -> None:
        syscalls.munmap(self.base, len(self.weights) * self.each)


@pytest.fixture
def stack() -> Iterator[Stack]:
    made = Stack(6, 150, 96)
    yield made
    made.close()


def test_each_stacked_matrix_multiplies_its_rows(stack: Stack) -> None:
    counts, x = np.array([1, 0, 40, 3, 0, 17]), torch.randn(9, 96)
    index = np.random.default_rng(1).integers(0, 9, counts.sum())
    found = stack.matrices.multiply(x, counts, index)
    of = np.repeat(np.arange(6), counts)
    expected = torch.stack([stack.weights[e] @ x[row] for e, row in zip(of, index, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    in_order = stack.matrices.multiply(x[index].contiguous(), counts)
    assert torch.equal(in_order, found)
    for slot in (0, 5, 60):  # alone, to the bit
        alone, row = np.bincount([of[slot]], minlength=6), index[slot : slot + 1]
        assert torch.equal(stack.matrices.multiply(x, alone, row)[0], found[slot])


def test_a_stacked_matrix_without_rows_is_not_read(stack: Stack) -> None:
    counts, x = np.array([0, 2, 0, 0, 30, 0]), torch.randn(32, 96)
    before = stack.matrices.multiply(x, counts)
    stack.forbid({1, 4})
    assert torch.equal(stack.matrices.multiply(x, counts), before)


def test_rows_that_do_not_fit_stacked_matrices(stack: Stack) -> None:
    counts, x = np.array([0, 2, 0, 0, 1, 0]), torch.randn(3, 96)
    for bad in ((x.double(), counts), (x[:, :64], counts), (x, counts[:5]), (x[:2], counts)):
        with pytest.raises(BrokenPromise):
            stack.matrices.multiply(*bad)
