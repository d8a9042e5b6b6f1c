"""A job's tensors: what they say, that they stay where they are, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import NOWHERE, GpuBatch, Scratch
from ballast.kernels.gpu.kv import GpuKv

SHAPE = (3, 2, 4, 2, 8)


class Recorded:
    """An implementation that notes what it is asked for."""

    def __init__(self, batch: GpuBatch) -> None:
        self.batch = batch
        self.asked: list[object] = []

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.asked.append(("write", layer))

    def attend(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, params: AttentionParams
    ) -> None:
        self.asked.append(("attend", layer, params))


def kv() -> GpuKv:
    stride = torch.Size(SHAPE).numel() + 48
    return GpuKv.over(torch.zeros(10 * stride + 7), SHAPE, stride)


def test_blocks_cover_memory_without_overlap() -> None:
    made = kv()
    inner = 4 * 2 * 8
    assert made.cache.stride()[:3] == (6 * inner + 48, 2 * inner, inner)
    assert made.cache.shape == (10, *SHAPE)
    places = torch.arange(made.cache.untyped_storage().nbytes() // 4)
    seen = places.as_strided(made.cache.shape, made.cache.stride()).flatten()
    assert len(seen.unique()) == len(seen)
    k, v = made.layer(1)
    assert k.shape == (10, 4, 2, 8)
    v[3] = 5.0
    assert float(made.cache.sum()) == 5.0 * 64 == float(made.cache[3, 1, 1].sum())


def test_blocks_that_would_overlap_are_refused() -> None:
    size = torch.Size(SHAPE).numel()
    with pytest.raises(BrokenPromise, match="apart"):
        GpuKv.over(torch.zeros(4 * size), SHAPE, size - 1)


def test_padding_does_nothing_and_addresses_stay() -> None:
    batch = GpuBatch(kv(), 4, Bucket(4, 16, 4, 32), Recorded)
    watched = (batch.tokens, batch.positions, batch.wanted, batch.tables, batch.few, batch.out)
    addresses = [t.data_ptr() for t in watched]
    batch.fill([7, 8, 9, 1, 2, 3], [0, 2, 5], [2, 3, 1], [[4], [6, 1], [9, 8]], [1, 5])
    batch.fill([5, 6, 7], [3, 9], [1, 2], [[3], [0, 2, 7]], [0, 2])
    assert batch.tokens.tolist() == [5, 6, 7] + [0] * 13
    assert batch.positions.tolist() == [3, 9, 10] + [0] * 13
    assert batch.slots.tolist() == [15, 29, 30] + [NOWHERE] * 13
    assert batch.tables[:4].tolist() == [3, 0, 2, 7]
    assert batch.wanted.tolist() == [0, 2, 0, 0]
    assert batch.n_wanted == 2
    assert batch.counts.tolist() == [2, 0, 0]
    assert addresses == [t.data_ptr() for t in watched]


def test_a_long_decode_is_counted_in_items_and_one_merge() -> None:
    batch = GpuBatch(kv(), 4, Bucket.decode(2, 200), Recorded)
    batch.fill([1, 2], [520, 3], [1, 1], [list(range(131)), [5]], [0, 1])
    assert batch.counts.tolist() == [4, 0, 1]
    assert batch.n_tokens == 2


def test_all_goes_to_the_implementation_once_it_was_checked() -> None:
    made: list[Recorded] = []
    batch = GpuBatch(kv(), 4, Bucket(1, 16, 1, 32), lambda b: made.append(Recorded(b)) or made[0])
    batch.fill([1], [0], [1], [[2]], [0])
    q, k = torch.zeros(16, 4, 8), torch.zeros(16, 2, 8)
    batch.write(1, k, k)
    params = AttentionParams(0.5, window=3)
    batch.attend(2, q, batch.out, params)
    assert made[0].asked == [("write", 1), ("attend", 2, params)]
    for wrong in (q[:15], q.half(), torch.zeros(16, 8, 4).transpose(1, 2)):
        with pytest.raises(BrokenPromise):
            batch.attend(0, wrong, torch.empty_like(wrong), AttentionParams(0.5))
    with pytest.raises(BrokenPromise):
        batch.attend(0, q, batch.out.double(), AttentionParams(0.5))
    for sinks in (torch.zeros(2), torch.zeros(4).half(), torch.zeros(8)[::2]):
        with pytest.raises(BrokenPromise, match="sinks"):
            batch.attend(0, q, batch.out, AttentionParams(0.5, sinks=sinks))
    with pytest.raises(BrokenPromise):
        batch.write(0, k, q)


@pytest.mark.parametrize(
    ("starts", "counts", "tables", "wanted"),
    [
        ([0] * 3, [1] * 3, [[1]] * 3, [0]),
        ([0], [17], [list(range(5))], [0]),
        ([0] * 2, [1] * 2, [list(range(17))] * 2, [0]),
        ([0], [4], [[1]], [0, 1, 2]),
    ],
)
def test_a_job_that_does_not_fit_is_refused(
    starts: list[int], counts: list[int], tables: list[list[int]], wanted: list[int]
) -> None:
    batch = GpuBatch(kv(), 4, Bucket(2, 16, 2, 32), Recorded)
    with pytest.raises(BrokenPromise, match="does not fit"):
        batch.fill([0] * sum(counts), starts, counts, tables, wanted)


def test_a_bucket_of_decodes_takes_no_chunk() -> None:
    batch = GpuBatch(kv(), 4, Bucket.decode(4, 16), Recorded)
    with pytest.raises(BrokenPromise, match="several new tokens"):
        batch.fill([1, 2], [0], [2], [[1]], [1])


def test_models_whose_jobs_take_turns_have_some_memory_in_common() -> None:
    device = torch.device("cpu")
    common = Scratch(device)
    a, b, alone = Scratch(device, common), Scratch(device, common), Scratch(device)
    size, u8 = (64,), torch.uint8
    taken = [s.tensor("workspace", size, u8, common=True).data_ptr() for s in (a, b, a, alone)]
    assert taken[0] == taken[1] == taken[2] != taken[3]
    assert a.tensor("out", size, u8).data_ptr() != b.tensor("out", size, u8).data_ptr()
