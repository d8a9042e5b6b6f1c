"""Compute linear layers on CPU: pack weights in panels, and build the tables of their kernel.

Used by `models` to run matrices and by `weights` to pack them.

y = x W^T for W (n outputs, k inputs). A panel holds 64 outputs, input by input: what one thread
reads from front to back. float32 panels are (k, 64); bfloat16 ones (k / 2, 64, 2), so that two
inputs of an output lie in one 32-bit word and are widened by a shift and a mask, or multiplied by
one instruction (`linear_code.DOTS`). These are also oneDNN's blocked layouts on AVX-512.
Activations are float32, rounded to bfloat16 as they are multiplied where such an instruction takes
pairs of both; sums are float32.

A layer is a row of an int64 array, whose fields are those of `linear_code`: `tables` fills what a
model fixes (weights, shapes), `place` what a job does (rows, activations). `kernel` is the function
that runs one. A row of a result depends on its inputs alone: neither the rows around it nor the
number of threads changes a bit of it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ballast.core.errors import BrokenPromise
from ballast.kernels import linear_code as code
from ballast.kernels import team
from ballast.kernels.linear_code import ADD, GATED, GATED_ERF, GATED_TANH, PANEL, STORE

__all__ = [
    "ADD",
    "GATED",
    "GATED_ERF",
    "GATED_TANH",
    "STORE",
    "gate_kernel",
    "gate_tables",
    "gated",
    "kernel",
    "linear",
    "pack",
    "packed_bytes",
    "packed_shape",
    "place",
    "rows",
    "tables",
    "unpack",
    "warm_up",
]

Array = np.ndarray[Any, Any]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_compiling = threading.Lock()


def packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of panels of n outputs, k inputs; k is padded to a multiple of 16 or 32."""
    panels = -(-n // PANEL)
    if dtype == torch.float32:
        return panels, -(-k // 16) * 16, PANEL
    if dtype == torch.bfloat16:
        return panels, -(-k // 32) * 16, PANEL, 2
    raise BrokenPromise(f"no linear layers in {dtype}: float32 and bfloat16 can be packed")


def packed_bytes(n: int, k: int, dtype: torch.dtype) -> int:
    """Return the bytes of panels of n outputs and k inputs."""
    return torch.Size(packed_shape(n, k, dtype)).numel() * dtype.itemsize


def pack(weight: Tensor) -> Tensor:
    """Pack `weight` (n, k) into panels of its dtype, padded with zeros: see `packed_shape`."""
    n, k = weight.shape
    panels, steps, _, *pair = packed_shape(n, k, weight.dtype)
    width = pair[0] if pair else 1
    padded = pad(weight, (0, steps * width - k, 0, panels * PANEL - n))
    split = padded.view(panels, PANEL, steps, width).transpose(1, 2)
    return split.contiguous().view(panels, steps, PANEL, *pair)


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """Return the matrix (n, k) that `pack` has packed."""
    return rows(packed, n, k, torch.arange(n))


def rows(packed: Tensor, n: int, k: int, ids: Tensor) -> Tensor:
    """Rows `ids` (int64, any count) of the matrix: (len(ids), k). For embeddings that are packed.

    Raises BrokenPromise if `packed` is not of n outputs and k inputs.
    """
    _check(packed, n, k)
    found = packed[ids // PANEL, :, ids % PANEL]
    return found.reshape(len(ids), -1)[:, :k]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave gate and up for GATED: 32 rows of `gate`, the 32 of `up`, and so on; padded with
    zeros.

    Of two matrices (n / 2, k) to pack, or of two biases (n / 2,): up to 63 rows more than n.
    """
    half = PANEL // 2
    missing = -len(gate) % half
    both = [pad(t, (0, 0) * (t.dim() - 1) + (0, missing)) for t in (gate, up)]
    return torch.stack([t.view(-1, half, *t.shape[1:]) for t in both], 1).flatten(0, 2)


def tables(weights: Array, n: int, k: int, *, mode: int = STORE, bias: Array | int = 0) -> Array:
    """Build int64 (layers, fields) for layers of one shape with panels at addresses `weights`.

    `n` counts the rows of the matrices: in gated modes twice the outputs. `bias` are addresses of
    n float32 each (in gated modes of whole panels, in their order); 0: none.
    """
    made = np.zeros((len(weights), code.N_FIELDS), np.int64)
    made[:, code.WEIGHTS] = weights
    made[:, code.N], made[:, code.K] = n, k
    made[:, code.MODE] = mode
    made[:, code.BIAS] = bias
    return made


def place(
    made: Array,
    count: int,
    x: tuple[int, int],
    out: tuple[int, int],
    *,
    x_index: int = 0,
    out_index: int = 0,
    scale: int = 0,
) -> None:
    """Set rows and activations of tables (..., fields), and that they have not been run.

    `x` and `out`: address, and elements from a row to the next, of float32. `x_index` and
    `out_index`: addresses of int64 (count,) that say which rows of x to take and which of out to
    write, each of those once at most; `scale` of float32 (count,) by which mode ADD multiplies.
    0: the first `count` rows in order; no scale.
    """
    made[..., code.NEXT] = 0
    made[..., code.ROWS] = count
    made[..., code.X], made[..., code.X_STRIDE] = x
    made[..., code.OUT], made[..., code.OUT_STRIDE] = out
    made[..., code.X_INDEX] = x_index
    made[..., code.OUT_INDEX] = out_index
    made[..., code.SCALE] = scale


def kernel(dtype: torch.dtype) -> int:
    """Address of `void (int64 *table)` for weights of `dtype`; compiles it if it is new."""
    with _compiling:
        return code.address_of(_NAMES[dtype])


def warm_up(dtype: torch.dtype | None = None) -> None:
    """Compile the kernel of `dtype`, or all, unless Numba's cache has them (seconds)."""
    for kind in _NAMES if dtype is None else (dtype,):
        kernel(kind)
    gate_kernel(torch.float32)


def linear(
    x: Tensor,
    packed: Tensor,
    n: int,
    k: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    mode: int = STORE,
    x_index: Tensor | None = None,
    out_index: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Run one layer on the team of threads: x (rows, k) float32 -> (rows, n), or n / 2 if gated.

    Writes into `out` if given, which mode ADD needs. Indices and scale are those of `place`.
    Raises BrokenPromise for what the kernel would misread.
    """
    _check(packed, n, k)
    count = len(x) if x_index is None else len(x_index)
    width = n // 2 if mode >= GATED else n
    if out is None:
        if mode == ADD or out_index is not None:
            raise BrokenPromise("nothing to add to: no output was given")
        out = torch.empty(count, width)
    biases = n if mode < GATED else len(packed) * PANEL
    for name, given, shape, dtype in (
        ("inputs", x, (len(x), k), torch.float32),
        ("outputs", out, (len(out), width), torch.float32),
        ("bias", bias, (biases,), torch.float32),
        ("input rows", x_index, (count,), torch.int64),
        ("output rows", out_index, (count,), torch.int64),
        ("scale", scale, (count,), torch.float32),
    ):
        if given is None:
            continue
        if (
            given.shape != shape
            or given.dtype != dtype
            or (given.numel() and given.stride(-1) != 1)
        ):
            raise BrokenPromise(
                f"{name} of a linear layer are {given.dtype} {tuple(given.shape)} with strides "
                f"{given.stride()}, not {dtype} {shape}"
            )
    if out_index is None and len(out) != count:
        raise BrokenPromise(f"{count} rows do not fit an output of {len(out)}")
    made = tables(np.array([packed.data_ptr()]), n, k, mode=mode, bias=_address(bias))
    place(
        made,
        count,
        (x.data_ptr(), x.stride(0)),
        (out.data_ptr(), out.stride(0)),
        x_index=_address(x_index),
        out_index=_address(out_index),
        scale=_address(scale),
    )
    team.run(kernel(packed.dtype), made.ctypes.data, torch.get_num_threads())
    return out


def gate_kernel(dtype: torch.dtype) -> int:
    """Address of `void (int64 *table)` for tables of `gate_tables` over inputs of `dtype`."""
    with _compiling:
        return code.address_of(f"gate_{_NAMES[dtype]}")


def gate_tables(count: int, n: int, *, interleaved: bool, mode: int = GATED) -> Array:
    """int64 (count, fields): f(gate) * up, n outputs each; `place` completes them.

    To the bit what that gated mode makes of the same numbers. A row of inputs has gates before ups;
    or `interleaved`, half a panel of each in turns.
    """
    made = np.zeros((count, code.N_FIELDS), np.int64)
    made[:, code.N], made[:, code.K] = n, PANEL // 2 if interleaved else n
    made[:, code.MODE] = mode
    return made


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(packed: Tensor, n: int, k: int) -> None:
    if packed.shape != packed_shape(n, k, packed.dtype) or not packed.is_contiguous():
        raise BrokenPromise(
            f"{packed.dtype} {tuple(packed.shape)} are not the panels of {n} outputs, {k} inputs"
        )
