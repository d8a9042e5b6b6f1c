"""Attention of a GPU against the reference: on one where there is one, else in an interpreter.

`test_gpu_attention.py` and `triton/test_triton_interpreted.py` run this file
in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import GpuBatch, Scratch
from ballast.kernels.gpu.kv import GpuKv
from ballast.kernels.triton.attention import TritonAttention
from benchmarks.interpreted import chained_dots
from tests.kernels.reference import Example, Ragged, examples, reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
"""NumPy's, of what is not a number: these cases put it where it must not be read."""
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LAYERS = 2
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 0, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


@dataclass
class Job:
    """Sequences with random K and V of all that came before, blocks in random order."""

    kv: GpuKv
    starts: list[int]
    counts: list[int]
    tables: list[list[int]]
    past: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(
        cls,
        ragged: list[tuple[int, int]],
        *,
        kv_heads: int,
        dim: int,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Job:
        starts, counts = [s for s, _ in ragged], [c for _, c in ragged]
        needed = [-(-(s + c) // block_tokens) for s, c in ragged]
        shape = (LAYERS, 2, block_tokens, kv_heads, dim)
        stride = torch.Size(shape).numel() + 32
        n = sum(needed) + 3
        # What nothing has written is not a number: it must not be read.
        memory = torch.full((n * stride,), float("nan"), dtype=dtype, device=DEVICE)
        kv = GpuKv.over(memory, shape, stride)
        order = torch.randperm(n).tolist()
        tables = [[order.pop() for _ in range(k)] for k in needed]
        past = []
        for table, start in zip(tables, starts, strict=True):
            k, v = (torch.randn(start, kv_heads, dim).to(dtype) for _ in range(2))
            position = torch.arange(start)
            block = torch.tensor(table)[position // block_tokens]
            for both, new in enumerate((k, v)):
                kv.cache[block, 1, both, position % block_tokens] = new.to(DEVICE)
            past.append((k, v))
        return cls(kv, starts, counts, tables, past)

    def batch(
        self,
        heads: int,
        make: Callable[[GpuBatch], Any],
        bucket: Bucket | None = None,
        invariant: bool = False,
    ) -> GpuBatch:
        blocks = sum(len(table) for table in self.tables)
        bucket = bucket or Bucket.holding(self.counts, 1, blocks)
        batch = GpuBatch(self.kv, heads, bucket, make, invariant=invariant)
        self.fill(batch)
        return batch

    def fill(self, batch: GpuBatch) -> None:
        tokens = [0] * sum(self.counts)
        batch.fill(tokens, self.starts, self.counts, self.tables, [0])


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """In the strides that transformers has it in, with rows of padding that are not a number."""
    whole = torch.full((x.shape[1], rows, x.shape[2]), float("nan"), dtype=x.dtype, device=DEVICE)
    whole[:, : len(x)] = x.transpose(0, 1).to(DEVICE)
    return whole.transpose(0, 1)


def run(
    job: Job,
    batch: GpuBatch,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    q, k, v = (padded(x, batch.n_tokens) for x in qkv)
    batch.write(1, k, v)
    out = batch.out
    own = None if sinks is None else sinks.to(DEVICE)
    batch.attend(1, q, out, AttentionParams(q.shape[2] ** -0.5, window, softcap, own))
    return out[: len(qkv[0])].cpu().clone()


def inputs(job: Job, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, kv = sum(job.counts), job.kv
    sizes = (heads, kv.kv_heads, kv.kv_heads)
    q, k, v = (torch.randn(n, h, kv.head_dim).to(kv.dtype) for h in sizes)
    return q, k, v


def compare(
    job: Job,
    found: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    q, k, v = qkv
    row = 0
    for start, count, (k0, v0) in zip(job.starts, job.counts, job.past, strict=True):
        part = slice(row, row + count)
        keys, values = torch.cat([k0, k[part]]), torch.cat([v0, v[part]])
        scale = q.shape[2] ** -0.5
        expected = reference(q[part], keys, values, start, scale, window, softcap, sinks)
        torch.testing.assert_close(found[part].double(), expected, **TOLERANCES[q.dtype])
        row += count


sequences: st.SearchStrategy[Ragged] = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 90), st.integers(240, 600)),
        st.one_of(st.just(1), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=3,
)


# A GPU compiles three kernels anew for nearly every example.
@settings(max_examples=15 if GPU else 10, deadline=None, phases=[Phase.generate])
@given(examples(sequences, dims=(8, 20, 64, 80)), st.sampled_from(list(TOLERANCES)))
def test_triton_equals_softmax_in_float64(e: Example, dtype: torch.dtype) -> None:
    layer = e.layer(dtype)
    heads, kv_heads = e.heads
    job = Job.of(e.ragged, kv_heads=kv_heads, dim=e.dim, block_tokens=e.block_tokens, dtype=dtype)
    qkv = inputs(job, heads)
    batch = job.batch(heads, lambda b: TritonAttention(b, 3))
    compare(job, run(job, batch, qkv, *layer), qkv, *layer)


def test_models_whose_jobs_take_turns_have_what_is_merged_in_common() -> None:
    torch.manual_seed(0)
    common = Scratch(DEVICE)
    models = [(64, torch.float32), (80, torch.bfloat16)]
    jobs = [Job.of([(500, 1), (40, 3)], kv_heads=2, dim=d, dtype=kind) for d, kind in models]
    kept = [inputs(job, 4) for job in jobs]
    batches = []
    for job in jobs:
        bucket = Bucket.holding(job.counts, 1, sum(len(table) for table in job.tables))
        batch = GpuBatch(job.kv, 4, bucket, TritonAttention, Scratch(DEVICE, common))
        job.fill(batch)
        batches.append(batch)
    for i in (0, 1, 0):
        compare(jobs[i], run(jobs[i], batches[i], kept[i]), kept[i])
    least = common.tensor("partial", (1,), torch.float32)
    assert least.untyped_storage().nbytes() > 4, "they have taken it there"


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_write_touches_nothing_else(dtype: torch.dtype) -> None:
    job = Job.of([(3, 30), (40, 1), (0, 50)], kv_heads=2, dim=24, dtype=dtype)
    expected = job.kv.cache.clone()
    _, k, v = inputs(job, 4)
    batch = job.batch(4, TritonAttention)
    batch.write(1, padded(k, batch.n_tokens), padded(v, batch.n_tokens))
    row = 0
    for table, start, count in zip(job.tables, job.starts, job.counts, strict=True):
        for position in range(start, start + count):
            place = expected[table[position // 16], 1, :, position % 16]
            place[0], place[1] = k[row].to(DEVICE), v[row].to(DEVICE)
            row += 1
    torch.testing.assert_close(job.kv.cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_neither_batch_nor_place_nor_bucket_change_a_bit_of_a_decode(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ragged = [(57, 1), (520, 1), (255, 1), (256, 1), (0, 1), (40, 20)]
    job = Job.of(ragged, kv_heads=2, dim=32, dtype=dtype)
    qkv = inputs(job, 8)
    together = run(job, job.batch(8, TritonAttention), qkv)
    for i in range(5):
        alone = Job.of([ragged[i]], kv_heads=2, dim=32, dtype=dtype)
        alone.kv.cache[alone.tables[0]] = job.kv.cache[job.tables[i]]
        part = tuple(x[i : i + 1] for x in qkv)
        batch = alone.batch(8, lambda b: TritonAttention(b, 5), Bucket.decode(1 + i, 50))
        found = run(alone, batch, part)  # type: ignore[arg-type]
        assert torch.equal(found[0], together[i])


@pytest.mark.parametrize(
    ("dtype", "window", "sunk"),
    [(torch.float32, 100, True), (torch.float16, None, False), (torch.bfloat16, None, True)],
)
@pytest.mark.parametrize("dim", [32] + [128] * GPU)
def test_neither_batch_nor_chunks_change_a_bit_of_an_invariant_row(
    dtype: torch.dtype, window: int | None, sunk: bool, dim: int
) -> None:
    torch.manual_seed(2)
    sinks = torch.randn(8).mul(4).to(dtype) if sunk else None
    # Two sequences' chunks, over a multiple of SPLIT; then parts of the first one by themselves.
    job = Job.of([(490, 60), (40, 3)], kv_heads=2, dim=dim, dtype=dtype)
    qkv = inputs(job, 8)
    with chained_dots():
        whole = run(job, job.batch(8, TritonAttention, invariant=True), qkv, window, sinks=sinks)
        compare(job, whole, qkv, window, sinks=sinks)
        for at, count in ((0, 1), (0, 25), (9, 3), (21, 1), (30, 19), (59, 1)):
            part = slice(at, at + count)
            alone = Job(job.kv, [490 + at], [count], job.tables[:1], [])
            q, k, v = (x[part] for x in qkv)
            batch = alone.batch(8, TritonAttention, invariant=True)
            found = run(alone, batch, (q, k, v), window, sinks=sinks)
            assert torch.equal(found, whole[part])


@pytest.mark.parametrize("window", [None, 20])
def test_window_reads_no_block_before_it(window: int | None) -> None:
    torch.manual_seed(4)
    job = Job.of([(100, 1), (70, 3), (40, 90)], kv_heads=2, dim=16)
    qkv = inputs(job, 4)
    batch = job.batch(4, TritonAttention)
    expected = run(job, batch, qkv, window)
    for table, start in zip(job.tables, job.starts, strict=True):
        job.kv.cache[table[: (start - 19) // 16]] = float("nan")
    assert torch.equal(run(job, batch, qkv, window), expected) is (window is not None)


def test_a_bucket_serves_one_job_after_another() -> None:
    torch.manual_seed(7)
    jobs = [
        Job.of(r, kv_heads=2, dim=16)
        for r in ([(300, 1), (9, 1), (600, 1)], [(20, 1)], [(5, 1), (513, 1)])
    ]
    bucket = Bucket.decode(3, 100)
    kv = GpuKv(torch.cat([j.kv.cache for j in jobs]))
    batch = GpuBatch(kv, 4, bucket, TritonAttention)
    addresses = [batch.tokens.data_ptr(), batch.few.data_ptr(), batch.tables.data_ptr()]
    offset = 0
    for job in jobs:
        n = job.kv.blocks
        moved = Job(
            kv,
            job.starts,
            job.counts,
            [[b + offset for b in t] for t in job.tables],
            job.past,
        )
        moved.fill(batch)
        qkv = inputs(moved, 4)
        compare(moved, run(moved, batch, qkv), qkv)
        offset += n
    assert addresses == [batch.tokens.data_ptr(), batch.few.data_ptr(), batch.tables.data_ptr()]


def test_soft_cap_is_accurate_for_small_and_large_scores() -> None:
    # One token's weight against that of another, whose score is 0, gives the capped score back.
    job = Job.of([(0, 2)], kv_heads=1, dim=8)
    batch = job.batch(1, TritonAttention)
    for size in torch.logspace(-3, 1.5, 24).tolist():
        q, k, v = (torch.zeros(2, 1, 8) for _ in range(3))
        q[1, 0, 0], k[1, 0, 0], v[1, 0, 0], v[0, 0, 1] = 1.0, size * 8**0.5, 1.0, 1.0
        out = run(job, batch, (q, k, v), softcap=5.0)[1, 0].double()
        score = 5.0 * torch.tensor(size / 5.0, dtype=torch.float64).tanh()
        torch.testing.assert_close((out[0] / out[1]).log(), score, rtol=3e-6, atol=5e-7)


@pytest.mark.skipif(not GPU, reason="PyTorch finds no GPU")
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("block_tokens", [16, 256])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_shapes_of_real_models_equal_the_reference(
    dtype: torch.dtype,
    block_tokens: int,
    window: int | None,
    softcap: float | None,
) -> None:
    torch.manual_seed(9)
    for ragged in ([(700, 1), (3, 300), (0, 70), (5000, 1)], [(1200, 1), (0, 1), (255, 1)]):
        job = Job.of(ragged, kv_heads=2, dim=128, block_tokens=block_tokens, dtype=dtype)
        qkv = inputs(job, 8)
        found = run(job, job.batch(8, TritonAttention), qkv, window, softcap)
        compare(job, found, qkv, window, softcap)
