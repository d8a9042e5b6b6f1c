"""Kernels between matrices against PyTorch's operations: on a GPU, else in Triton's interpreter.

`test_gpu_layer.py` and `triton/test_triton_interpreted.py` run this file in a process of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.job import SequenceWork
from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.gpu.layer import HeadVectors
from ballast.kernels.plain.attention import PlainAttention
from ballast.kernels.plain.layer import PlainLayer
from ballast.kernels.triton import layer as layer_module
from ballast.kernels.triton.attention import TritonAttention
from ballast.kernels.triton.hybrid_gemm import HybridTiles, hybrid_gemm
from ballast.kernels.triton.layer import TritonLayer
from ballast.models.gpu.fused import GpuFusedModel
from benchmarks.interpreted import chained_dots
from tests.kernels.attention_cases import DEVICE, GPU, Job
from tests.models.fused.test_fused import checkpoint
from tests.models.host_served import HostServed
from tests.models.tiny import GREEDY, Served

NEAR: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float16: {"rtol": 4e-3, "atol": 2e-2},
    torch.bfloat16: {"rtol": 3e-2, "atol": 0.15},
}
"""In bfloat16 a value at the border of two may become the other one, and what follows from it."""
torch.set_float32_matmul_precision("highest")


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same, where it begins at no multiple of 16 bytes."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype, device=DEVICE)
    moved = memory[1:].view(x.shape)
    moved.copy_(x)
    return moved


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, **NEAR[expected.dtype], equal_nan=True)
    if GPU and expected.dtype is not torch.float32:
        # Triton's interpreter cuts off what does not fit, where GPUs round.
        assert (found.nan_to_num() != expected.nan_to_num()).float().mean() < 0.005


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("width", [150, 1024])
@pytest.mark.parametrize("added", ["nothing", "more", "more and bias"])
def test_add_norm(dtype: torch.dtype, width: int, added: str) -> None:
    torch.manual_seed(width)
    hidden, weight = drawn(5, width, dtype=dtype), drawn(width, dtype=dtype)
    more = None if added == "nothing" else drawn(5, width, dtype=dtype)
    bias = drawn(width, dtype=torch.float32) if "bias" in added else None
    ours = hidden.clone()
    expected = PlainLayer().add_norm(hidden, more, bias, weight, 1e-5)
    close(TritonLayer().add_norm(ours, more, bias, unaligned(weight), 1e-5), expected)
    close(ours, hidden)


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norms", "bias"),
    [(4, 2, 16, False, False), (2, 2, 24, False, True), (6, 1, 80, True, False)],
)
def test_rotate(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, norms: bool, bias: bool
) -> None:
    torch.manual_seed(dim)
    ragged = [(3, 9), (40, 1), (0, 3)]
    jobs = [_job(ragged, heads, kv_heads, dim, dtype) for _ in range(2)]
    rows, width = jobs[0].n_tokens, (heads + 2 * kv_heads) * dim
    qkv = drawn(rows, width, dtype=dtype)
    qkv[sum(n for _, n in ragged) :] = float("nan")
    vectors = HeadVectors(
        drawn(width, dtype=torch.float32) if bias else None,
        *(drawn(dim, dtype=dtype) if norms else None for _ in range(2)),
    )
    angles = torch.rand(rows, dim // 2) * 400
    turns = tuple(t.to(dtype).to(DEVICE) for t in (angles.cos(), angles.sin()))
    ours = qkv.clone()
    expected = PlainLayer().rotate(jobs[0], 1, qkv, vectors, 1e-6, *turns)
    found = TritonLayer().rotate(jobs[1], 1, ours, vectors, 1e-6, *turns)
    assert found.data_ptr() == ours.data_ptr(), "attention reads queries where they are"
    close(found, expected)
    # What was not to be written is not a number, in both.
    close(jobs[1].kv.cache, jobs[0].kv.cache)


def _job(
    ragged: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> GpuBatch:
    torch.manual_seed(7)
    job = Job.of(ragged, kv_heads=kv_heads, dim=dim, dtype=dtype)
    return job.batch(heads, PlainAttention)


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("width", [150, 2048])
def test_gate(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    both = drawn(3, 2 * width, dtype=dtype) * 20
    close(TritonLayer().gate(both), PlainLayer().gate(both))


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize(
    ("n", "k", "with_"), [(3, 1100, {"norm", "gated"}), (21, 256, {"bias", "added"}), (8, 40, {})]
)
def test_one_row(dtype: torch.dtype, n: int, k: int, with_: set[str]) -> None:
    torch.manual_seed(n)
    x, matrix = drawn(1, k, dtype=dtype), drawn(2 * n if "gated" in with_ else n, k, dtype=dtype)
    matrix *= k**-0.5
    more: dict[str, Any] = {
        "norm": unaligned(drawn(k, dtype=dtype)),
        "bias": drawn(n, dtype=torch.float32),
        "added": drawn(1, n, dtype=dtype),
        "gated": True,
    }
    more = {name: value for name, value in more.items() if name in with_}
    expected = PlainLayer().multiply_row(x, matrix, epsilon=1e-5, **more)
    found = TritonLayer().multiply_row(x, matrix, epsilon=1e-5, **more)
    # Of sums of k products, in another order.
    near = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=near)


@pytest.mark.skipif(GPU, reason="it is served from the host's memory")
def test_a_whole_model(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3")
    served = Served(tmp_path, attention=TritonAttention, model_impl="fused")
    assert isinstance(served.model, GpuFusedModel)
    jobs = [
        [
            SequenceWork("a", list(range(3, 12)), 0, [4, 7], GREEDY),
            SequenceWork("b", [9, 8], 0, [2], GREEDY),
        ],
        [SequenceWork("a", [5], 9, [4, 7], GREEDY)],
    ]
    expected = [served.logits(*job) for job in jobs]
    served.model._kernels = k = TritonLayer()
    served.model._row, served.model._one_row = partial(k.multiply_row, epsilon=1e-6), True
    for job, logits in zip(jobs, expected, strict=True):
        torch.testing.assert_close(served.logits(*job), logits, rtol=0, atol=1e-4)
    served.close()


@pytest.mark.skipif(GPU, reason="it is served from the host's memory")
def test_neither_chunks_nor_other_sequences_change_a_models_logits(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3")
    how = {"kernels": TritonLayer(), "invariant": True}
    served = Served(
        tmp_path, attention=TritonAttention, gpu=how, model_impl="fused", dtype="bfloat16"
    )
    tokens, other = [5, *range(3, 12)], SequenceWork("b", [9, 8, 7], 0, [2], GREEDY)

    def part(begin: int, end: int, blocks: list[int]) -> SequenceWork:
        return SequenceWork("a", tokens[begin:end], begin, blocks, GREEDY)

    with chained_dots():
        alone = [served.logits(part(0, 9, [4])), served.logits(part(9, 10, [4]))]
        for cut in (1, 8):
            first = served.logits(other, part(0, cut, [5]))
            assert len(first) == 2
            crowd = [served.logits(part(cut, 9, [5]), other)[:1]]
            crowd.append(served.logits(other, part(9, 10, [5]))[1:])
            for found, expected in zip(crowd, alone, strict=True):
                assert torch.equal(found, expected)
    served.close()


@pytest.mark.skipif(GPU, reason="it is served from the host's memory")
def test_neither_places_nor_shares_change_a_models_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in host memory are multiplied by HybridGEMM, others by the invariant GEMM."""
    small = HybridTiles(os_rows=16, os_columns=16, ws_rows=16, ws_columns=16, depth=16, warps=4)
    monkeypatch.setattr(layer_module, "TILES", small)
    shares: list[float] = []

    def noted(x: torch.Tensor, address: int, n: int, share: float, *rest: Any) -> torch.Tensor:
        shares.append(share)
        return hybrid_gemm(x, address, n, share, *rest)

    monkeypatch.setattr(layer_module, "hybrid_gemm", noted)
    checkpoint(tmp_path, "qwen3")
    how = {"kernels": TritonLayer(), "invariant": True}
    served = HostServed(
        tmp_path, attention=TritonAttention, gpu=how, model_impl="fused", dtype="bfloat16"
    )
    segments = range(len(served.spec.segment_bytes))
    prompt = SequenceWork("a", list(range(3, 23)), 0, [4, 7], GREEDY)
    token = SequenceWork("a", [5], 20, [4, 7], GREEDY)
    with chained_dots():
        expected = [served.logits(prompt), served.logits(token)]
        assert not shares
        for units, share in (((0, 2), 0.5), (segments, 0.0)):
            served.read(units, share)
            for work, logits in zip((prompt, token), expected, strict=True):
                assert torch.equal(served.logits(work), logits)
    assert set(shares) == {0.0, 0.5, 1.0}, "a pass of one tile of rows has 1"
    served.close()
