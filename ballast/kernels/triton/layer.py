"""Launch the Triton kernels of a layer's operations between its GEMMs; implements `LayerKernels`.

Chosen by `gpu.layer`. Not tuned yet. With TRITON_INTERPRET=1 (set before this module is
imported) it runs on CPU tensors, slowly, which is how it is tested.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.gpu.layer import HeadVectors
from ballast.kernels.triton import layer_code as code
from ballast.kernels.triton.attention import LOADED, multiprocessors
from ballast.kernels.triton.gemm import INVARIANT_DTYPES, invariant_gemm, of_one_chain
from ballast.kernels.triton.hybrid_gemm import TILES, hybrid_gemm
from ballast.kernels.triton.row_code import row_code

GATED = 1024
"""Elements of a row that one program gates."""
MOST_ROWS, STEP_BYTES, STAGES = 8, 1024, 4
"""For `row_code`: rows of a matrix that a program reads side by side, bytes of each at once, and
steps begun ahead and under way: 24 KiB on their way for each program."""

ROTATE = {"num_warps": 1, "enable_fp_fusion": False}
"""Options of `rotate_code`. Fused, a product that is rounded to 16 bits and then added becomes one
multiply-add, which rounds once: other numbers than those of `transformers`."""

LEAST_PROGRAMS = 4
"""Least programs of `row_code` per multiprocessor, if the matrix has as many rows."""


class TritonLayer:
    """Implements `LayerKernels`."""

    def __init__(self) -> None:
        self._multiprocessors: int | None = None

    def add_norm(
        self,
        hidden: Tensor,
        more: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        epsilon: float,
    ) -> Tensor:
        rows, width = hidden.shape
        out = torch.empty_like(hidden)
        block = int(triton.next_power_of_2(width))
        code.add_norm_code[(rows,)](
            hidden,
            more,
            _address(bias),
            _address(weight),
            out,
            width,
            epsilon,
            ADD=more is not None,
            BIAS=bias is not None,
            WIDTH=block,
            DTYPE=_kind(hidden.dtype),
            ALIGNED=_aligned(bias, weight),
            num_warps=warps(block),
        )
        return out

    def rotate(
        self,
        batch: GpuBatch,
        layer: int,
        qkv: Tensor,
        vectors: HeadVectors,
        epsilon: float,
        cosine: Tensor,
        sine: Tensor,
    ) -> Tensor:
        kv, heads = batch.kv, batch.heads
        keys, values = kv.layer(layer)
        code.rotate_code[(len(qkv), heads + 2 * kv.kv_heads)](
            qkv,
            _address(vectors.bias),
            _address(vectors.q_norm),
            _address(vectors.k_norm),
            cosine,
            sine,
            _address(keys),
            _address(values),
            batch.slots,
            keys.stride(0),
            epsilon,
            HEADS=heads,
            KV_HEADS=kv.kv_heads,
            DIM=kv.head_dim,
            HALF=int(triton.next_power_of_2(kv.head_dim // 2)),
            BLOCK_TOKENS=kv.block_tokens,
            BIAS=vectors.bias is not None,
            NORM=vectors.q_norm is not None,
            DTYPE=_kind(qkv.dtype),
            ALIGNED=_aligned(vectors.bias, vectors.q_norm, vectors.k_norm, keys, values),
            **ROTATE,
        )
        return qkv.view(len(qkv), -1, kv.head_dim)[:, :heads]

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        code.gate_code[(rows, triton.cdiv(width, GATED))](gate_up, out, width, BLOCK=GATED)
        return out

    def multiply(self, x: Tensor, matrix: Tensor) -> Tensor:
        if x.dtype not in INVARIANT_DTYPES:
            return torch.nn.functional.linear(x, matrix)
        return invariant_gemm(x, matrix)

    def multiply_host(self, x: Tensor, matrix: Tensor, os_share: float) -> Tensor:
        if x.dtype not in INVARIANT_DTYPES or not of_one_chain(x.device):
            # HybridGEMM takes 16 bits, and its tiles fit those GPUs alone.
            return self.multiply(x, matrix)
        # One tile of rows reads weights once whatever the share, and needs no partial sums then.
        share = 1.0 if len(x) <= TILES.os_rows else os_share
        return hybrid_gemm(x, matrix.data_ptr(), len(matrix), share, TILES)

    def multiply_row(
        self,
        x: Tensor,
        matrix: Tensor,
        *,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        gated: bool = False,
        bias: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        n, k = matrix.shape
        n = n // 2 if gated else n
        out = x.new_empty(1, n)
        outputs = self._outputs(n, gated, x.device)
        row_code[(triton.cdiv(n, outputs),)](
            x,
            _address(matrix),
            _address(norm),
            _address(bias),
            added,
            out,
            n,
            k,
            epsilon,
            NORM=norm is not None,
            BIAS=bias is not None,
            ADD=added is not None,
            GATED=gated,
            N=outputs,
            K=STEP_BYTES // x.dtype.itemsize,
            STAGES=STAGES,
            DTYPE=_kind(x.dtype),
            ALIGNED=_aligned(matrix, norm, bias),
        )
        return out

    def _outputs(self, n: int, gated: bool, device: torch.device) -> int:
        """Outputs of a program: as many as leave each multiprocessor some programs."""
        most = MOST_ROWS // 2 if gated else MOST_ROWS
        if self._multiprocessors is None:
            self._multiprocessors = multiprocessors(device)
        wanted = n // (LEAST_PROGRAMS * self._multiprocessors)
        return next((p for p in (8, 4, 2) if p <= min(most, wanted)), 1)


def warps(width: int) -> int:
    """Warps of a program that norms `width` elements: 16 a thread, within a program's limits."""
    return min(max(width // 512, 1), 16)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _aligned(*tensors: Tensor | None) -> int:
    """Bytes of which all of them begin at multiples, up to what is loaded at once."""
    there = [t for t in tensors if t is not None]
    if not any(t.data_ptr() % LOADED for t in there):
        return LOADED
    return min(t.dtype.itemsize for t in there)


def _kind(dtype: torch.dtype) -> tl.dtype:
    found: tl.dtype = getattr(tl, str(dtype).removeprefix("torch."))
    return found
