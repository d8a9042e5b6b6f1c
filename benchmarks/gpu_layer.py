"""Where the time of a layer goes on the fast path of a GPU: each of its launches by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.attention import attention_kernels
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.gpu.kv import GpuKv
from ballast.kernels.gpu.layer import HeadVectors, LayerKernels, layer_kernels
from benchmarks.gpu_apart import Findings, attempted
from benchmarks.gpu_device import Gpu

BLOCK_TOKENS = 16
EPSILON = 1e-5


class Sizes(NamedTuple):
    """Of a layer, and how many of them are gone through, so that no cache holds their weights."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    layers: int = 8


OF_8B = Sizes()


def layer(
    gpu: Gpu,
    found: Findings,
    sizes: Sizes = OF_8B,
    context: int = 1024,
    batches: tuple[int, ...] = (1, 32),
    make: Any = None,
) -> None:
    """Microseconds of each launch in a decode of a layer as an 8B model has, in bfloat16, and what
    of weights it reads in a second; in a CUDA graph, so that the host does not count."""
    for n in batches:
        result: dict[str, dict[str, Any]] = {}
        for name, n_bytes, launch in _launches(gpu.device, sizes, n, context, make):
            result[name] = attempted(partial(_timed, gpu, launch, sizes.layers, n_bytes))
        found[f"batch_{n}"] = result
        gpu.give_back()


def _timed(
    gpu: Gpu, launch: Callable[[int], object], layers: int, n_bytes: int
) -> dict[str, float]:
    def through() -> None:
        for i in range(layers):
            launch(i)

    seconds = gpu.seconds(gpu.replayed(through), 20) / layers
    read = {"bytes_per_second": n_bytes / seconds} if n_bytes else {}
    return {"microseconds": 1e6 * seconds, **read}


def _launches(
    device: torch.device, s: Sizes, n: int, context: int, make: Any
) -> Iterator[tuple[str, int, Callable[[int], object]]]:
    """(name, bytes of weights, launch of a layer)."""
    dtype = torch.bfloat16

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device).mul_(0.02)

    each = -(-(context + 1) // BLOCK_TOKENS)
    shape = (s.layers, 2, BLOCK_TOKENS, s.kv_heads, s.dim)
    stride = torch.Size(shape).numel()
    kv = GpuKv.over(drawn(n * each * stride), shape, stride)
    bucket = Bucket.decode(n, n * each)
    batch = GpuBatch(kv, s.heads, bucket, make or attention_kernels(device))
    tables = [list(range(i, n * each, n)) for i in range(n)]
    batch.fill([0] * n, [context] * n, [1] * n, tables, list(range(n)))
    k, rows = layer_kernels(device), batch.n_tokens
    q, width = s.heads * s.dim, (s.heads + 2 * s.kv_heads) * s.dim
    norm, hidden, more = drawn(s.hidden), drawn(rows, s.hidden), drawn(rows, s.hidden)
    qkv, attended, both = drawn(rows, width), drawn(rows, q), drawn(rows, 2 * s.intermediate)
    gated, angles = drawn(rows, s.intermediate), drawn(rows, s.dim // 2)
    vectors = HeadVectors()

    def rotate(i: int) -> Tensor:
        return k.rotate(batch, i, qkv, vectors, EPSILON, angles, angles)

    query = qkv.view(rows, -1, s.dim)[:, : s.heads]

    def attend(i: int) -> None:
        batch.attend(i, query, batch.out, AttentionParams(s.dim**-0.5))

    yield "sum and norm", 0, lambda i: k.add_norm(hidden, more, None, norm, EPSILON)
    yield "rotate, write K and V", 0, rotate
    yield "attention", 0, attend
    yield "gate", 0, lambda i: k.gate(both)
    products: dict[str, tuple[tuple[int, int], Tensor, dict[str, Any]]] = {
        "q/k/v": ((width, s.hidden), hidden, {"norm": norm}),
        "output": ((s.hidden, q), attended, {"added": more}),
        "gate and up": ((2 * s.intermediate, s.hidden), hidden, {"norm": norm, "gated": True}),
        "down": ((s.hidden, s.intermediate), gated, {"added": more}),
    }
    for name, (size, x, with_) in products.items():
        matrices = [drawn(*size) for _ in range(s.layers)]
        n_bytes = matrices[0].nbytes
        yield f"{name}, GEMM", n_bytes, partial(_gemm, x, matrices)
        if rows == 1:
            yield f"{name}, one row", n_bytes, partial(_one_row, k, x, matrices, with_)


def _gemm(x: Tensor, matrices: list[Tensor], i: int) -> Tensor:
    return linear(x, matrices[i])


def _one_row(
    k: LayerKernels, x: Tensor, matrices: list[Tensor], with_: dict[str, Any], i: int
) -> Tensor:
    return k.multiply_row(x, matrices[i], epsilon=EPSILON, **with_)
