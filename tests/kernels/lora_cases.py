"""LoRA's Triton kernels against float64: on a GPU, else in Triton's interpreter.

`test_gpu_lora.py` and `triton/test_triton_interpreted.py` run this file in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import Scratch
from ballast.kernels.gpu.lora import GpuAdaptedRows, GpuLoraGroup, Lora
from ballast.kernels.gpu.staging import StagingBuffer
from ballast.kernels.lora import LoraMatrices, LoraTarget
from ballast.kernels.plain.lora import PlainLora
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.tensor import tensor_at

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
Make = Callable[[Sequence[GpuLoraGroup], torch.dtype], Lora]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def triton_lora(groups: Sequence[GpuLoraGroup], dtype: torch.dtype) -> Lora:
    from ballast.kernels.triton.lora import TritonLora

    return TritonLora(groups, dtype, DEVICE, Scratch(DEVICE))


def plain_lora(groups: Sequence[GpuLoraGroup], dtype: torch.dtype) -> Lora:
    return PlainLora(groups, dtype, partial(cuda_tensor_at, device=DEVICE) if GPU else tensor_at)


@dataclass
class Random:
    """Random matrices, and what they add in float64; a missing entry has an address of nothing."""

    dtype: torch.dtype
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scales: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = field(default_factory=dict)

    def group(
        self, inputs: int, outputs: Sequence[int], ranks: Sequence[Sequence[int]]
    ) -> GpuLoraGroup:
        """`ranks[target][adapter]`; 0: it has nothing there. Two columns lie between targets."""
        targets, column = [], 0
        for i, n in enumerate(outputs):
            entries: list[LoraMatrices | None] = []
            for j, rank in enumerate(ranks[i]):
                if not rank:
                    entries.append(None)
                    continue
                a = (torch.randn(rank, inputs) / inputs**0.5).to(self.dtype).to(DEVICE)
                b = torch.randn(rank, n).to(self.dtype).to(DEVICE)
                self.kept.append((a, b))
                self.scales[i, j] = a, b, 1.5 / rank
                entries.append(LoraMatrices(a.data_ptr(), b.data_ptr(), rank, 1.5 / rank))
            targets.append(LoraTarget(n, tuple(entries), column))
            column += n + 2
        return GpuLoraGroup(inputs, tuple(targets))

    def expected(self, group: GpuLoraGroup, x: Tensor, y: Tensor, adapters: list[int]) -> Tensor:
        made = y.double().clone()
        for (i, j), (a, b, scale) in self.scales.items():
            target = group.targets[i]
            columns = slice(target.column, target.column + target.outputs)
            for row, adapter in enumerate(adapters):
                if adapter == j:
                    made[row, columns] += scale * (x[row].double() @ a.double().t()) @ b.double()
        return made


def rows_of(adapters: list[int], bucket: Bucket) -> GpuAdaptedRows:
    staged = StagingBuffer({**GpuAdaptedRows.sizes(bucket), "end": ((1,), torch.int32)}, DEVICE)
    both = GpuAdaptedRows.both(staged.tensors, bucket)
    assert both is not None
    host = staged.host()
    for rows in both:
        rows.fill(host, torch.tensor(adapters, dtype=torch.int64).numpy(), bucket.adapted_rows)
    staged.send(4)
    return both[0]


def bucket_of(n: int, adapters: int, decodes: bool) -> Bucket:
    if decodes:
        return Bucket.decode(n, 1, adapters)
    return Bucket.holding([n], n, 1, adapters)


def check(
    make: Make,
    adapters: list[int],
    sizes: tuple[int, list[int]],
    ranks: list[list[int]],
    dtype: torch.dtype,
    decodes: bool,
) -> None:
    inputs, outputs = sizes
    random = Random(dtype)
    group = random.group(inputs, outputs, ranks)
    bucket = bucket_of(len(adapters), len(ranks[0]), decodes)
    rows, capacity = rows_of(adapters, bucket), bucket.tokens
    # Padding is not a number: it must not be read, and nothing else may be written.
    x = torch.full((capacity, inputs + 8), float("nan"), dtype=dtype, device=DEVICE)[:, :inputs]
    y = torch.full((capacity, group.width + 5), float("nan"), dtype=dtype, device=DEVICE)
    x[: len(adapters)] = torch.randn(len(adapters), inputs).to(dtype)
    y[: len(adapters)] = torch.randn(len(adapters), group.width + 5).to(dtype)
    before = y.clone()
    make([group], dtype).add(0, rows, x, y[:, : group.width])
    expected = random.expected(group, x, before, adapters)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    for row, adapter in enumerate(adapters):
        if adapter < 0:
            assert torch.equal(y[row], before[row])


def multiply_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter add products in one order, whatever the CPU.

    It multiplies by BLAS, whose order of adding depends on the CPU and on a row's place.
    """
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
        products = a.data[:, :, None].astype(np.float32) * b.data[None].astype(np.float32)
        return interpreter.TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@settings(max_examples=15 if GPU else 6, deadline=None, phases=[Phase.generate])
@given(
    st.lists(st.integers(-1, 2), min_size=1, max_size=70),
    st.sampled_from([(16, [16]), (37, [41]), (600, [24, 5]), (1100, [130]), (64, [32, 16, 16])]),
    st.lists(st.sampled_from([0, 1, 3, 8, 17, 70]), min_size=3, max_size=3),
    st.sampled_from(list(TOLERANCES)),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rows_get_what_their_adapter_adds(
    adapters: list[int],
    sizes: tuple[int, list[int]],
    ranks: list[int],
    dtype: torch.dtype,
    decodes: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    of = [ranks[i:] + ranks[:i] for i in range(len(sizes[1]))]
    of[0][0] = of[0][0] or 4
    check(triton_lora, adapters, sizes, of, dtype, decodes)


def test_neither_batch_nor_place_change_a_bit_of_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        multiply_in_order(monkeypatch)
    torch.manual_seed(2)
    random = Random(torch.float32)
    group = random.group(1200, [70], [[8, 5]])
    lora = triton_lora([group], torch.float32)
    adapters = [0, 1, -1, 1, *[0] * 20]
    x, y = torch.randn(24, 1200, device=DEVICE), torch.randn(24, 70, device=DEVICE)

    def added(which: list[int]) -> Tensor:
        bucket = Bucket.decode(len(which), 1, 2)
        into = torch.zeros(bucket.tokens, 70, device=DEVICE)
        of = torch.zeros(bucket.tokens, 1200, device=DEVICE)
        into[: len(which)], of[: len(which)] = y[which], x[which]
        lora.add(0, rows_of([adapters[i] for i in which], bucket), of, into)
        return into[: len(which)]

    together = added(list(range(24)))
    for i in (0, 1, 2, 23):
        assert torch.equal(added([i])[0], together[i])
    assert torch.equal(added(list(range(23, -1, -1))).flip(0), together)
