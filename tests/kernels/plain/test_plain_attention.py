"""Attention in PyTorch's own operations, against the reference, over blocks in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.gpu.kv import GpuKv
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kernels.plain import attention as plain_attention
from ballast.kernels.plain.attention import PlainAttention
from tests.effort import tries
from tests.kernels.reference import reference

SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4)
DIM, BLOCK, LAYERS, KV_HEADS = 8, 4, 2, 2


class Case:
    """Sequences with random K and V, those of what came before already in blocks in any order."""

    def __init__(self, spans: list[tuple[int, int]], group: int) -> None:
        torch.manual_seed(len(spans))
        self.starts, self.counts = [s for s, _ in spans], [n for _, n in spans]
        needed = [-(-(s + n) // BLOCK) for s, n in spans]
        shape = (LAYERS, 2, BLOCK, KV_HEADS, DIM)
        stride = torch.Size(shape).numel() + 16
        # What nothing has written is not a number: it must not be read.
        memory = torch.full((sum(needed) * stride,), float("nan"))
        self.kv = GpuKv.over(memory, shape, stride)
        order = torch.randperm(sum(needed)).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in needed]
        self.whole = [[torch.randn(s + n, KV_HEADS, DIM) for _ in range(2)] for s, n in spans]
        for (start, _), table, both in zip(spans, self.tables, self.whole, strict=True):
            at = torch.arange(start)
            for which, new in enumerate(both):
                self.kv.cache[torch.tensor(table)[at // BLOCK], 1, which, at % BLOCK] = new[:start]
        bucket = Bucket.holding(self.counts, 1, sum(needed))
        self.batch = GpuBatch(self.kv, KV_HEADS * group, bucket, PlainAttention)
        self.batch.fill([0] * sum(self.counts), self.starts, self.counts, self.tables, [0])
        self.query = self.padded(torch.randn(sum(self.counts), KV_HEADS * group, DIM))

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.full((self.batch.n_tokens, *x.shape[1:]), float("nan"))
        whole[: len(x)] = x
        return whole

    def attend(
        self,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        new = (
            torch.cat([w[b][s:] for w, s in zip(self.whole, self.starts, strict=True)])
            for b in (0, 1)
        )
        self.batch.write(1, *map(self.padded, new))
        out = torch.zeros_like(self.query)
        self.batch.attend(1, self.query, out, AttentionParams(0.3, window, softcap, sinks))
        return out


@given(
    SIZES,
    st.sampled_from([1, 2]),
    st.sampled_from([None, 1, 7]),
    st.sampled_from([None, 5.0]),
    st.booleans(),
)
@settings(max_examples=tries(15, all=40))
def test_it_agrees_with_the_reference(
    spans: list[tuple[int, int]],
    group: int,
    window: int | None,
    softcap: float | None,
    sunk: bool,
) -> None:
    case = Case(spans, group)
    sinks = 4 * torch.randn(case.query.shape[1]) if sunk else None
    out, at = case.attend(window, softcap, sinks), 0
    for (k, v), start, n in zip(case.whole, case.starts, case.counts, strict=True):
        result = reference(case.query[at : at + n], k, v, start, 0.3, window, softcap, sinks)
        assert torch.allclose(out[at : at + n].double(), result, atol=1e-5)
        at += n


def test_blocks_that_lie_elsewhere_in_each_layer_are_found_there() -> None:
    """Those of the first sequence are read in slots of one layer each, on a block that is free."""
    case = Case([(13, 1), (6, 3)], 2)
    expected = case.attend().clone()
    cache, unit = case.kv.cache, 2 * BLOCK * KV_HEADS * DIM
    spare = torch.full((2, *cache.stride()[:1]), float("nan"))
    memory = torch.cat([cache.as_strided((cache.shape[0] * cache.stride(0),), (1,)), *spare])
    kv = GpuKv.over(memory, tuple(cache.shape[1:]), cache.stride(0))  # type: ignore[arg-type]
    free, moved = cache.shape[0], case.tables[0][:3]
    slots = [(free * cache.stride(0) + i * unit) for i in range(3)]
    for at, block in zip(slots, moved, strict=True):
        memory[at : at + unit] = kv.cache[block, 1].flatten()
        kv.cache[block] = float("nan")
    table = [-1, -2, -3, *case.tables[0][3:]]
    places = LayerPlaces((-1, -2, -3), 4 * np.array([slots, slots]), 4 * 16)
    batch = GpuBatch(kv, case.batch.heads, case.batch.bucket, PlainAttention)
    tables = [table, case.tables[1]]
    batch.fill([0] * 4, case.starts, case.counts, tables, [0], places=places)
    case.kv, case.batch = kv, batch
    assert torch.equal(case.attend(), expected)
    batch.forget_places()
    assert batch.blocks(1)[2] is batch.tables


def test_rows_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(3, 30)], 2)
    whole = case.attend()
    monkeypatch.setattr(plain_attention, "SCORE_BYTES", 7 * 4 * 4 * 33)
    assert torch.allclose(whole, case.attend(), atol=1e-6)
