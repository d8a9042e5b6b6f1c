"""Paged attention against plain softmax in float64, over ragged batches and odd shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.errors import BrokenPromise
from ballast.kernels import attention_code, attention_table, team
from ballast.kernels.attention import AttentionParams
from ballast.kernels.paged_attention import (
    NO_WINDOW,
    KvArray,
    LayerPlaces,
    PagedBatch,
    scratch_bytes,
    warm_up,
)
from tests.effort import tries
from tests.kernels.reference import Example, examples, reference

LAYERS = 2


@dataclass
class Cache:
    """A KV cache of random content in a tensor, blocks in random order, with padding between."""

    kv: KvArray
    memory: torch.Tensor
    tables: list[list[int]]

    @classmethod
    def of(
        cls,
        starts: list[int],
        counts: list[int],
        *,
        kv_heads: int,
        dim: int,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        padding: int = 32,
    ) -> Cache:
        needed = [-(-(s + c) // block_tokens) for s, c in zip(starts, counts, strict=True)]
        stride = LAYERS * 2 * block_tokens * kv_heads * dim + padding
        n = sum(needed) + 3
        memory = torch.randn(n, stride).to(dtype)
        order = torch.randperm(n).tolist()
        tables = [[order.pop() for _ in range(k)] for k in needed]
        kv = KvArray(memory.data_ptr(), stride, LAYERS, block_tokens, kv_heads, dim, dtype)
        return cls(kv, memory, tables)

    def blocks(self) -> torch.Tensor:
        """(blocks, layers, 2, block_tokens, kv_heads, head_dim), a view."""
        kv = self.kv
        shape = (LAYERS, 2, kv.block_tokens, kv.kv_heads, kv.head_dim)
        size = torch.Size(shape).numel()
        return self.memory[:, :size].unflatten(1, shape)

    def read(self, sequence: int, layer: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (n, kv_heads, head_dim) of the first tokens of a sequence."""
        both = self.blocks()[self.tables[sequence], layer]
        return both[:, 0].flatten(0, 1)[:n], both[:, 1].flatten(0, 1)[:n]


def inputs(
    n: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value with the strides that transformers has them in."""
    q = torch.randn(1, heads, n, dim).to(dtype)[0].transpose(0, 1)
    k = torch.randn(n, kv_heads, dim).to(dtype)
    v = torch.randn(n, 2, kv_heads, dim).to(dtype)[:, 1]
    return q, k, v


def attend(
    cache: Cache,
    heads: int,
    starts: list[int],
    counts: list[int],
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    batch = PagedBatch(cache.kv, heads, starts, counts, cache.tables)
    batch.write(layer, k, v)
    out = torch.full((len(q), heads, q.shape[2]), float("nan"), dtype=q.dtype)
    scale = q.shape[2] ** -0.5
    batch.attend(layer, q, out, AttentionParams(scale, window, softcap, sinks))
    return out


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]
"""Of queries and output, and of the KV cache."""


@settings(max_examples=tries(20, all=60))
@given(examples(), st.sampled_from(DTYPES))
def test_equals_softmax_in_float64(e: Example, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    rows, dtype = dtypes
    window, softcap, sinks = e.layer(dtype)
    heads, kv_heads = e.heads
    cache = Cache.of(
        e.starts,
        e.counts,
        kv_heads=kv_heads,
        dim=e.dim,
        block_tokens=e.block_tokens,
        dtype=dtype,
    )
    q, k, v = inputs(sum(e.counts), heads, kv_heads, e.dim, dtype)
    q = q.to(rows)
    out = attend(cache, heads, e.starts, e.counts, 1, q, k, v, window, softcap, sinks)

    def read(i: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        start, count = e.ragged[i]
        keys, values = cache.read(i, 1, start + count)
        assert torch.equal(keys[start:], k[part])
        assert torch.equal(values[start:], v[part])
        return keys, values

    exact = rows is torch.float32
    near = {"rtol": 0, "atol": 1e-5} if exact else {"rtol": 8e-3, "atol": 1e-6}
    e.compare(out, q, read, sinks, near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_nothing_else(dtype: torch.dtype) -> None:
    starts, counts = [3, 40, 0], [30, 1, 100]
    cache = Cache.of(starts, counts, kv_heads=2, dim=24, dtype=dtype)
    expected = Cache(cache.kv, cache.memory.clone(), cache.tables)
    _, k, v = inputs(sum(counts), 4, 2, 24, dtype)
    PagedBatch(cache.kv, 4, starts, counts, cache.tables).write(1, k, v)
    row = 0
    for table, start, count in zip(cache.tables, starts, counts, strict=True):
        for position in range(start, start + count):
            place = expected.blocks()[table[position // 16], 1, :, position % 16]
            place[0], place[1] = k[row], v[row]
            row += 1
    assert torch.equal(cache.memory, expected.memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 2, 32), (8, 2, 64), (8, 8, 16), (4, 2, 80), (5, 1, 20)])
@pytest.mark.parametrize("window", [None, 300])
def test_neither_batch_nor_place_nor_threads_nor_chunks_change_a_bit(
    dtype: torch.dtype, shape: tuple[int, int, int], window: int | None
) -> None:
    # From widening in place to doing so in a buffer, and from whole contexts to cut ones.
    torch.manual_seed(1)
    heads, kv_heads, dim = shape
    starts, counts = [0, 57, 700, 11, 600], [90, 1, 1, 64, 7]
    cache = Cache.of(starts, counts, kv_heads=kv_heads, dim=dim, dtype=dtype)
    q, k, v = inputs(sum(counts), heads, kv_heads, dim, dtype)
    threads = torch.get_num_threads()
    together = attend(cache, heads, starts, counts, 0, q, k, v, window)
    try:
        torch.set_num_threads(1)
        assert torch.equal(attend(cache, heads, starts, counts, 0, q, k, v, window), together)
    finally:
        torch.set_num_threads(threads)

    row = 0
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        alone = Cache.of([start], [count], kv_heads=kv_heads, dim=dim, dtype=dtype)
        alone.blocks()[alone.tables[0]] = cache.blocks()[cache.tables[i]]
        half = count // 2
        for first, n in ((0, half), (half, count - half), (0, count)):
            if n:
                rows = slice(row + first, row + first + n)
                place = [start + first], [n]
                found = attend(alone, heads, *place, 0, q[rows], k[rows], v[rows], window)
                assert torch.equal(found, together[rows])
        row += count


def test_infinite_values_stay_in_their_sequence() -> None:
    torch.manual_seed(2)
    starts, counts = [20, 20, 18], [1, 1, 3]
    cache = Cache.of(starts, counts, kv_heads=1, dim=16)
    for table in (cache.tables[0], cache.tables[2]):
        cache.blocks()[table] = float("inf")
    q, k, v = inputs(5, 2, 1, 16, torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # one worker and its buffers go through all sequences
        out = attend(cache, 2, starts, counts, 0, q, k, v)
    finally:
        torch.set_num_threads(threads)
    keys, values = cache.read(1, 0, 21)
    expected = reference(q[1:2], keys, values, 20, 0.25)
    torch.testing.assert_close(out[1:2].double(), expected, rtol=0, atol=1e-5)
    assert out[0].isnan().any()


def test_a_key_that_is_not_a_number_shows() -> None:
    torch.manual_seed(6)
    cache = Cache.of([20], [3], kv_heads=1, dim=16)
    q, k, v = inputs(3, 2, 1, 16, torch.float32)
    k[1, 0, 3] = float("nan")
    out = attend(cache, 2, [20], [3], 0, q, k, v)
    assert not out[0].isnan().any()  # comes before it
    assert out[1:].isnan().all()


def test_blocks_are_read_where_their_layer_lies_before_or_behind_the_cache() -> None:
    """Full blocks of the first sequence, as copies; what is written stays in its block."""
    starts, counts = [37, 5], [3, 1]
    cache = Cache.of(starts, counts, kv_heads=2, dim=16, padding=0)
    q, k, v = inputs(4, 4, 2, 16, torch.float32)
    expected = attend(cache, 4, starts, counts, 1, q, k, v)
    moved, size, kv = cache.tables[0][:2], cache.kv.layer_bytes, cache.kv
    whole = torch.full((cache.memory.numel() * 2 + size,), float("nan"))
    for before in (False, True):  # copies lie behind the cache, then before it
        at, copies = (size, 0) if before else (0, cache.memory.numel() + size)
        here = whole[at : at + cache.memory.numel()].view(cache.memory.shape)
        here.copy_(cache.memory)
        base = here.data_ptr()
        copied = whole[copies : copies + 2 * size // 4].view(2, -1)
        for slot, block in zip(copied, moved, strict=True):
            slot.copy_(cache.blocks()[block, 1].flatten())
            here[block] = float("nan")
        offsets = np.array([[slot.data_ptr() - base for slot in copied]] * LAYERS, np.int64)
        places = LayerPlaces(tuple(moved), offsets, 64)
        batch = PagedBatch(replace(kv, base=base), 4, starts, counts, cache.tables, places)
        batch.write(1, k, v)
        out = torch.empty(4, 4, 16)
        batch.attend(1, q, out, AttentionParams(16**-0.5))
        assert torch.equal(out, expected)
    far = LayerPlaces(tuple(moved), offsets - (64 << 31), 64)
    with pytest.raises(BrokenPromise, match="exceed a block table"):
        PagedBatch(kv, 4, starts, counts, cache.tables, far)


def test_extreme_scores_do_not_overflow() -> None:
    torch.manual_seed(3)
    cache = Cache.of([33], [40], kv_heads=1, dim=16)
    cache.memory.mul_(100.0)
    q, k, v = inputs(40, 1, 1, 16, torch.float32)
    out = attend(cache, 1, [33], [40], 0, q * 1000, k * 100, v)
    keys, values = cache.read(0, 0, 73)
    expected = reference(q * 1000, keys, values, 33, 0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("window", [None, 20])
def test_window_reads_no_block_before_it(window: int | None) -> None:
    torch.manual_seed(4)
    starts, counts = [100, 70], [1, 3]
    cache = Cache.of(starts, counts, kv_heads=2, dim=16)
    q, k, v = inputs(4, 4, 2, 16, torch.float32)
    expected = attend(cache, 4, starts, counts, 0, q, k, v, window)
    for table, start in zip(cache.tables, starts, strict=True):
        cache.blocks()[table[: (start - 19) // 16]] = float("nan")
    found = attend(cache, 4, starts, counts, 0, q, k, v, window)
    assert torch.equal(found, expected) is (window is not None)


def test_soft_cap_is_accurate_for_small_and_large_scores() -> None:
    # One token's weight against that of another, whose score is 0, gives the capped score back.
    sizes = torch.logspace(-3, 1.5, 64)
    cache = Cache.of([0], [2], kv_heads=1, dim=8)
    for size in sizes.tolist():
        q = torch.zeros(2, 1, 8)
        k, v = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
        q[1, 0, 0], k[1, 0, 0], v[1, 0, 0], v[0, 0, 1] = 1.0, size * 8**0.5, 1.0, 1.0
        out = attend(cache, 1, [0], [2], 0, q, k, v, softcap=5.0)[1, 0].double()
        score = 5.0 * torch.tensor(size / 5.0, dtype=torch.float64).tanh()
        torch.testing.assert_close((out[0] / out[1]).log(), score, rtol=2e-6, atol=3e-7)


@pytest.mark.parametrize(("rows", "dtype"), DTYPES)
def test_tables_of_all_layers_do_what_attend_does(rows: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    starts, counts = [50, 0, 7], [1, 40, 3]
    cache = Cache.of(starts, counts, kv_heads=2, dim=16, dtype=dtype)
    q, k, v = inputs(44, 6, 2, 16, dtype)
    q = q.to(rows)
    batch = PagedBatch(cache.kv, 6, starts, counts, cache.tables)
    out = torch.empty(44, 6, 16, dtype=rows)
    strides = q.stride()[:2]
    kernel, tables = batch.attend_tables(
        q.data_ptr(),
        (strides[0], strides[1]),
        out.data_ptr(),
        rows,
        0.25,
        np.array([NO_WINDOW, 12]),
        np.array([0.0, 2.0]),
    )
    assert tables.shape[0] == LAYERS
    for layer, (window, softcap) in enumerate([(None, None), (12, 2.0)]):
        batch.write(layer, k, v)
        team.run(kernel, tables[layer].ctypes.data, torch.get_num_threads())
        expected = torch.empty_like(out)
        batch.attend(layer, q, expected, AttentionParams(0.25, window, softcap))
        assert torch.equal(out, expected)


def test_refuses_what_would_leave_its_blocks() -> None:
    cache = Cache.of([0], [16], kv_heads=1, dim=16)
    with pytest.raises(BrokenPromise, match="do not fit into 1 blocks"):
        PagedBatch(cache.kv, 1, [1], [16], cache.tables)
    with pytest.raises(BrokenPromise):
        PagedBatch(cache.kv, 1, [0], [0], cache.tables)
    batch = PagedBatch(cache.kv, 1, [0], [16], cache.tables)
    wrong = torch.zeros(16, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(BrokenPromise, match="bfloat16"):
        batch.write(0, wrong, wrong)
    short = torch.zeros(15, 1, 16)
    with pytest.raises(BrokenPromise):
        batch.attend(0, short, torch.empty_like(short), AttentionParams(1.0))


def test_warm_up_compiles_all_and_scratch_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = attention_code.address_of

    def note(name: str) -> int:
        asked.append(name)
        return real(name)

    monkeypatch.setattr(attention_code, "address_of", note)
    warm_up()
    warm = set(asked)
    asked.clear()
    for dtype in (torch.float32, torch.bfloat16):
        warm_up(dtype)
        assert set(asked) < warm, "of one kind of cache, fewer"
        alone = set(asked)
        for rows in {dtype, torch.float32}:
            asked.clear()
            _attend_once(dtype, rows)
            assert asked, "it looks its kernels up"
            assert set(asked) <= alone, "nothing is left to compile for the first job"
        asked.clear()
    assert scratch_bytes(32, 8, 128) < 200_000


def _attend_once(dtype: torch.dtype, rows: torch.dtype) -> None:
    cache = Cache.of([3], [5], kv_heads=2, dim=16, dtype=dtype)
    batch = PagedBatch(cache.kv, 4, [3], [5], cache.tables)
    new = torch.randn(5, 2, 16).to(dtype)
    batch.write(0, new, new)
    query = torch.randn(5, 4, 16).to(rows)
    batch.attend(0, query, torch.empty_like(query), AttentionParams(0.25))


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 8), (32, 1), (71, 1), (12, 4)])
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_scratch_is_no_more_than_is_promised(heads: tuple[int, int], dim: int) -> None:
    """Room for it is kept in the arena before any batch is known."""
    n_heads, kv_heads = heads
    most = scratch_bytes(n_heads, kv_heads, dim)
    for counts in ([1], [1] * 20, [7, 1, 40], [300]):
        starts = [100] * len(counts)
        cache = Cache.of(starts, counts, kv_heads=kv_heads, dim=dim)
        batch = PagedBatch(cache.kv, n_heads, starts, counts, cache.tables)
        assert 0 < batch._attend[attention_table.SCRATCH_BYTES] <= most
