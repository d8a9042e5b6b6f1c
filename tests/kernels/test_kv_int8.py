"""KV in 8 bits: written as plain PyTorch rounds it, and attended to as what it then stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.kernels.attention import AttentionParams
from ballast.kernels.paged_attention import KvArray, PagedBatch
from benchmarks.kv_kinds import rounded
from tests.effort import tries
from tests.kernels.reference import Example, examples
from tests.kernels.test_paged_attention import inputs

LAYERS = 2


class Int8Cache:
    """A KV cache in int8, every byte of it 0xFF: a scale that nothing has written is NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, block_tokens: int = 16) -> None:
        kv = KvArray(0, 0, LAYERS, block_tokens, kv_heads, dim, torch.int8)
        needed = [-(-n // block_tokens) for n in lengths]
        stride, n = LAYERS * kv.layer_bytes + 64, sum(needed) + 2
        self.memory = torch.full((n, stride), -1, dtype=torch.int8)
        order = torch.randperm(n).tolist()
        self.tables = [[order.pop() for _ in range(k)] for k in needed]
        place = (self.memory.data_ptr(), stride, LAYERS, block_tokens, kv_heads, dim)
        self.kv = KvArray(*place, torch.int8)

    def read(self, sequence: int, layer: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (n, kv_heads, head_dim) that the first tokens of a sequence stand for."""
        kv = self.kv
        shape = (LAYERS, 2, kv.block_tokens, kv.token)
        rows = self.memory[:, : torch.Size(shape).numel()].unflatten(1, shape)
        rows = rows[self.tables[sequence], layer]
        elements = rows[..., : kv.scales].unflatten(-1, (kv.kv_heads, kv.head_dim)).float()
        scales = rows[..., kv.scales :].contiguous().view(torch.float32)
        both = elements * scales[..., None]
        return both[:, 0].flatten(0, 1)[:n], both[:, 1].flatten(0, 1)[:n]


def attended(
    cache: Int8Cache,
    starts: list[int],
    counts: list[int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    batch = PagedBatch(cache.kv, q.shape[1], starts, counts, cache.tables)
    batch.write(1, k, v)
    out = torch.full(q.shape, float("nan"))
    scale = q.shape[2] ** -0.5
    batch.attend(1, q.float(), out, AttentionParams(scale, window, softcap, sinks))
    return out


@settings(max_examples=tries(15, all=40))
@given(examples(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_equals_plain_rounding_and_softmax_in_float64(e: Example, dtype: torch.dtype) -> None:
    layer = e.layer(dtype)
    lengths = [start + count for start, count in e.ragged]
    cache = Int8Cache(lengths, e.heads[1], e.dim, e.block_tokens)
    every = [inputs(n, *e.heads, e.dim, dtype) for n in lengths]
    began = [(i, start) for i, start in enumerate(e.starts) if start]
    if began:
        tables, cache.tables = cache.tables, [cache.tables[i] for i, _ in began]
        before = [[x[:start] for x in every[i]] for i, start in began]
        q, k, v = (torch.cat(x) for x in zip(*before, strict=True))
        attended(cache, [0] * len(began), [start for _, start in began], q, k, v)
        cache.tables = tables
    now = [[x[start:] for x in of] for of, start in zip(every, e.starts, strict=True)]
    q, k, v = (torch.cat(x) for x in zip(*now, strict=True))
    out = attended(cache, e.starts, e.counts, q, k, v, *layer)

    def read(i: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = cache.read(i, 1, lengths[i])
        assert torch.equal(keys, rounded(every[i][1].float()))
        assert torch.equal(values, rounded(every[i][2].float()))
        return keys, values

    e.compare(out, q, read, layer[2], {"rtol": 0, "atol": 1e-5})


@pytest.mark.parametrize("shape", [(6, 2, 32), (8, 8, 16), (4, 2, 80), (5, 1, 20)])
def test_neither_chunks_nor_batch_nor_threads_change_a_bit(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    heads, kv_heads, dim = shape
    n = 700
    q, k, v = inputs(n, heads, kv_heads, dim, torch.float32)
    cache = Int8Cache([n], kv_heads, dim)
    whole = attended(cache, [0], [n], q, k, v)
    kept = cache.read(0, 1, n)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        other = Int8Cache([n, 3], kv_heads, dim)
        for first, last in ((0, 640), (640, 699), (699, 700)):
            rows, beside = slice(first, last), inputs(1, heads, kv_heads, dim, torch.float32)
            both = [torch.cat([x[rows], y]) for x, y in zip((q, k, v), beside, strict=True)]
            found = attended(other, [first, 0], [last - first, 1], *both)
            assert torch.equal(found[:-1], whole[rows])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(kept, other.read(0, 1, n), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_and_stays_in_its_sequence(bad: float) -> None:
    torch.manual_seed(2)
    q, k, v = inputs(7, 2, 1, 16, torch.float32)
    k[2, 0, 3] = bad
    out = attended(Int8Cache([4, 3], 1, 16), [0, 0], [4, 3], q, k, v)
    assert out[2:4].isnan().all()  # from its position on
    assert out[:2].isfinite().all()
    assert out[4:].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-44, 3e-43, 1e-38, 3e38])
def test_heads_of_any_size_are_within_half_a_step(size: float) -> None:
    torch.manual_seed(3)
    q, k, v = inputs(20, 2, 2, 24, torch.float32)
    k, v = (x / x.abs().amax() * size for x in (k, v))
    cache = Int8Cache([20], 2, 24)
    attended(cache, [0], [20], q, k, v)
    for found, given_ in zip(cache.read(0, 1, 20), (k, v), strict=True):
        step = given_.abs().amax(-1, keepdim=True) / 127
        # Below float32's normal numbers a step itself is rounded.
        assert ((found - given_).abs() <= step * 0.501 + 127 * 2.0**-149).all()
