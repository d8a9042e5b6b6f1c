"""The CPU attention kernel against reading the KV cache it needs, and against dense attention.

Decode: time of the kernel over (bytes of K and V / read bandwidth), for contexts in cold memory:
blocks of many layers in random order, gone through in turns, in pages of 4 KiB as those of a
device. The bandwidth is that of the fastest of three readers that go straight through the same
memory with the same number of threads, in turns with the kernel. All sequences of a batch have the
same context. `worst.<dtype>` is the largest median ratio from a context of 512 on.

Prefill: GFLOP/s of a chunk of 512 tokens, and those of `scaled_dot_product_attention` on the same
K and V in dense tensors.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ballast.kernels import attention_table as fields
from ballast.kernels import team
from ballast.kernels.attention import AttentionParams
from ballast.kernels.paged_attention import KvArray, PagedBatch, warm_up
from benchmarks.common import finish, interleave, options

MEMORY = 1 << 30
"""Bytes of KV cache."""
SWEEP = 128 << 20
"""Least bytes read in a measurement: several times the last cache."""
LAYERS = 16
MOST_SETS = 64
PREFILL = 512
BLOCK_TOKENS = 16
FROM = 512
"""The goal is set for contexts from here on."""
GOAL = 1.6


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.dim}"

    @property
    def token_bytes(self) -> int:
        """K and V of one token and layer."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize


SIZES = [(32, 8, 128), (16, 4, 64), (16, 16, 64)]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Memory:
    """Shared memory full of bfloat16 noise, which is noise as float32, too."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, MEMORY)
        self.floats = torch.frombuffer(self._map, dtype=torch.float32)
        noise = torch.randn(1 << 20).bfloat16()
        self.floats.view(torch.bfloat16).view(-1, len(noise))[:] = noise
        self._parts = itertools.cycle(self.floats.view(-1, SWEEP // 4))
        self.readers: dict[str, Callable[[Tensor], object]] = {
            "sum": torch.sum,
            "amax": torch.amax,
            "dot": lambda part: torch.dot(*part.chunk(2)),
        }
        self.best = dict.fromkeys(self.readers, 0.0)

    def bandwidth(self) -> float:
        """Bytes per second of the fastest reader, just now."""
        found = {}
        for name, read in self.readers.items():
            part = next(self._parts)
            begin = time.perf_counter()
            read(part)
            found[name] = SWEEP / (time.perf_counter() - begin)
            self.best[name] = max(self.best[name], found[name])
        return max(found.values())


class Decode:
    """One decode of `batch` sequences at `context`, through many layers and sets of blocks."""

    def __init__(self, memory: Memory, shape: Shape, batch: int, context: int) -> None:
        self._layer_bytes = batch * context * shape.token_bytes
        layers = max(1, min(LAYERS, MEMORY // self._layer_bytes))
        block_bytes = layers * BLOCK_TOKENS * shape.token_bytes
        kv = KvArray(
            memory.floats.data_ptr(),
            block_bytes // shape.dtype.itemsize,
            layers,
            BLOCK_TOKENS,
            shape.kv_heads,
            shape.dim,
            shape.dtype,
        )
        blocks = context // BLOCK_TOKENS
        sets = min(MEMORY // (layers * self._layer_bytes), MOST_SETS)
        order = np.random.default_rng(0).permutation(MEMORY // block_bytes)
        self._query = torch.randn(batch, shape.heads, shape.dim).to(shape.dtype)
        self._out = torch.empty_like(self._query)
        # What tables point to has to live.
        self._batches = [
            PagedBatch(kv, shape.heads, [context - 1] * batch, [1] * batch, tables.tolist())
            for tables in order[: sets * batch * blocks].reshape(sets, batch, blocks)
        ]
        calls = [
            one.attend_tables(
                self._query.data_ptr(),
                (shape.heads * shape.dim, shape.dim),
                self._out.data_ptr(),
                shape.dtype,
                shape.dim**-0.5,
            )
            for one in self._batches
        ]
        self._kernel = calls[0][0]
        self._tables = np.concatenate([tables for _, tables in calls])
        self._next = 0

    def seconds_per_byte(self) -> float:
        """Of the layers that come next, as many as make a sweep."""
        size = len(self._tables)
        n = min(-(-SWEEP // self._layer_bytes), size)  # counters are good for one run
        rows = [(self._next + i) % size for i in range(n)]
        self._next = (self._next + n) % size
        self._tables[:, [fields.NEXT, fields.WORKERS]] = 0
        base, stride = self._tables.ctypes.data, self._tables.strides[0]
        arguments = [base + row * stride for row in rows]
        threads = torch.get_num_threads()
        begin = time.perf_counter()
        for argument in arguments:
            team.run(self._kernel, argument, threads)
        return (time.perf_counter() - begin) / (n * self._layer_bytes)


def decode(memory: Memory, shape: Shape, batch: int, context: int, rounds: int) -> dict[str, Any]:
    case = Decode(memory, shape, batch, context)
    taken = interleave(
        {
            "kernel": case.seconds_per_byte,
            "reader": lambda: 1.0 / memory.bandwidth(),
        },
        rounds,
        warmup=1,
    )
    low, high = (ratio := taken["kernel"].over(taken["reader"])).spread
    return {
        "ratio": ratio.median,
        "low": low,
        "high": high,
        "kernel_gb_per_second": 1e-9 / taken["kernel"].median,
        "reader_gb_per_second": 1e-9 / taken["reader"].median,
    }


def prefill(memory: Memory, shape: Shape, start: int, rounds: int) -> dict[str, Any]:
    """A chunk of `PREFILL` tokens from position `start` on."""
    context = start + PREFILL
    block = BLOCK_TOKENS * shape.token_bytes // shape.dtype.itemsize
    kv = KvArray(
        memory.floats.data_ptr(),
        block,
        1,
        BLOCK_TOKENS,
        shape.kv_heads,
        shape.dim,
        shape.dtype,
    )
    n_blocks = context // BLOCK_TOKENS
    table = np.random.default_rng(0).permutation(n_blocks)
    query = torch.randn(PREFILL, shape.heads, shape.dim).to(shape.dtype)
    out = torch.empty_like(query)
    cache = memory.floats.view(shape.dtype)[: n_blocks * block]
    cache = cache.view(n_blocks, 2, BLOCK_TOKENS, shape.kv_heads, shape.dim)[
        torch.from_numpy(table)
    ]
    key, value = (cache[:, i].flatten(0, 1).transpose(0, 1)[None].contiguous() for i in range(2))
    queries = query.transpose(0, 1)[None].contiguous()
    mask = torch.arange(context) <= start + torch.arange(PREFILL)[:, None]
    flops = 4 * shape.heads * shape.dim * int(mask.sum())

    def ours() -> float:
        begin = time.perf_counter()
        one = PagedBatch(kv, shape.heads, [start], [PREFILL], [table.tolist()])
        one.attend(0, query, out, AttentionParams(shape.dim**-0.5))
        return flops / (time.perf_counter() - begin)

    def dense() -> float:
        begin = time.perf_counter()
        if start:
            sdpa(queries, key, value, attn_mask=mask, enable_gqa=True)
        else:
            sdpa(queries, key, value, is_causal=True, enable_gqa=True)
        return flops / (time.perf_counter() - begin)

    taken = interleave({"ours": ours, "dense": dense}, rounds, warmup=1)
    return {
        "gflop_per_second": taken["ours"].median / 1e9,
        "sdpa_gflop_per_second": taken["dense"].median / 1e9,
        "over_sdpa": taken["ours"].over(taken["dense"]).median,
    }


def main() -> None:
    args = options(__doc__)
    warm_up()
    memory = Memory()
    rounds = 3 if args.quick else 5
    sizes = SIZES[:1] if args.quick else SIZES
    contexts = (128, 512, 2048) if args.quick else (128, 512, 2048, 8192)
    result: dict[str, Any] = {"goal": GOAL, "decode": {}, "prefill": {}, "worst": {}}
    table = Table("dtype", "heads", "batch", *map(str, contexts), title="decode, of memory speed")
    for name, dtype in DTYPES.items():
        worst = 0.0
        for heads, kv_heads, dim in sizes:
            shape = Shape(heads, kv_heads, dim, dtype)
            for batch in (1, 4, 16):
                row = {}
                for context in contexts:
                    row[f"{context}"] = found = decode(memory, shape, batch, context, rounds)
                    if context >= FROM:
                        worst = max(worst, found["ratio"])
                result["decode"][f"{name} {shape.name} batch {batch}"] = row
                cells = (f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in row.values())
                table.add_row(name, shape.name, f"{batch}", *cells)
        result["worst"][name] = worst
        table.add_row(name, "worst", "", f"{worst:.2f}")
    table.add_section()
    for name, dtype in DTYPES.items():
        for heads, kv_heads, dim in sizes:
            shape = Shape(heads, kv_heads, dim, dtype)
            for start in (0, 1536):
                found = prefill(memory, shape, start, rounds)
                result["prefill"][f"{name} {shape.name} from {start}"] = found
                cells = (f"{key} {value:.3g}" for key, value in found.items())
                table.add_row(name, shape.name, f"from {start}", *cells)
    result["reader_gb_per_second"] = {k: v / 1e9 for k, v in memory.best.items()}
    finish(args, "attention", result, table)


if __name__ == "__main__":
    main()
