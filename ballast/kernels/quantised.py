"""Pack blocks of GGUF's types into quantised panels, and build the tables of their kernels on CPU.

Used by `weights` to pack matrices and by `models` to run them. `ballast.kernels.panel_forms` has
the layout; all bits of codes and scales are kept, so that a weight is what ggml dequantises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels import linear, linear_code
from ballast.kernels import quantised_code as code
from ballast.kernels.panel_forms import BLOCK, FORMS, NUMBERS, PANEL, panel_bytes

Array = np.ndarray[Any, Any]

_compiling = threading.Lock()
_ROWS = 16 * PANEL
"""Rows that are packed at once, so that what is unpacked meanwhile stays small."""


class _Blocks(NamedTuple):
    """Blocks of a type, taken apart: (blocks, ...) uint8."""

    codes: Tensor
    """(blocks, span)"""
    scales: Tensor
    """(blocks, 2 or 4): one or two float16."""
    subscales: Tensor | None = None
    """(blocks, parts, span // BLOCK, or twice that, if they are two to a block)."""


def tables(
    weights: Array, n: int, k: int, form: str, *, mode: int = linear.STORE, bias: Array | int = 0
) -> Array:
    """Build tables as `linear.tables`, for quantised panels of a form."""
    made = linear.tables(weights, n, k, mode=mode, bias=bias)
    made[:, linear_code.FORM] = NUMBERS[form]
    made[:, linear_code.PANEL_BYTES] = panel_bytes(form, k)
    return made


def kernel() -> int:
    """Address of `void (int64 *table)` for tables of `tables`; compiles it if it is new."""
    with _compiling:
        return code.address_of("linear")


def embed_kernel() -> int:
    """Address of the kernel that reads rows of quantised panels (`layer_code.PANEL_FORM`)."""
    with _compiling:
        return code.address_of("embed")


def pack(raw: Tensor, name: str, k: int) -> Tensor:
    """Pack the rows of a matrix into quantised panels: flat uint8.

    `raw`: uint8 (n, bytes of k elements), rows of GGUF's blocks; rows are padded with zeros.
    """
    form = FORMS[name]
    if k % form.span:
        raise BrokenPromise(f"rows of {k} elements are not whole blocks of {name}")
    spans, each = k // form.span, form.span_bytes
    panels = -(-len(raw) // PANEL)
    packed = torch.empty(panels, spans, each, dtype=torch.uint8)
    for first in range(0, len(raw), _ROWS):
        rows = raw[first : first + _ROWS]
        missing = -len(rows) % PANEL
        if missing:
            rows = torch.cat([rows, rows.new_zeros(missing, raw.shape[1])])
        target = packed[first // PANEL : (first + len(rows)) // PANEL]
        _pack_spans(rows.reshape(len(rows) * spans, -1), name, target)
    return packed.view(-1)


def finite_scales(raw: Tensor, name: str) -> bool:
    """Return whether all scales of blocks, uint8 (n, bytes), are finite: then so are weights."""
    blocks = _TAKEN_APART[name](raw.reshape(-1, _block_bytes(name)))
    return bool(blocks.scales.contiguous().view(torch.float16).isfinite().all())


def _block_bytes(name: str) -> int:
    form = FORMS[name]
    packed_bits = {"Q4_K": 144, "Q5_K": 176}
    return packed_bits.get(name, form.span_bytes // PANEL)


def _pack_spans(blocks: Tensor, name: str, target: Tensor) -> None:
    """Pack blocks of rows, (panels * PANEL * spans, bytes), into `target`: (panels, spans,
    bytes)."""
    form, (panels, spans, _) = FORMS[name], target.shape
    apart = _TAKEN_APART[name](blocks)
    n_blocks = form.span // BLOCK

    def by_output(t: Tensor) -> Tensor:
        """(panels * PANEL * spans, ...) as (panels, spans, ..., PANEL), its bytes last."""
        return t.view(panels, PANEL, spans, *t.shape[1:]).movedim(1, -1)

    at = 0
    if form.bits != 16:
        scales = by_output(apart.scales.contiguous().view(torch.int16))
        head = target[..., : form.head_bytes].view(torch.int16)
        head.view(panels, spans, -1, PANEL).copy_(scales)
        at = form.head_bytes
    body = target[..., at:].view(panels, spans, n_blocks, form.block_bytes)
    if apart.subscales is not None:
        sub = by_output(apart.subscales)  # (panels, spans, parts, n_blocks * subscales, PANEL)
        parts = sub.shape[2]
        sub = sub.view(panels, spans, parts, n_blocks, form.subscales, PANEL).transpose(2, 3)
        there = body[..., : form.subscale_bytes]
        there.view(panels, spans, n_blocks, parts, form.subscales, PANEL).copy_(sub)
    codes = by_output(apart.codes).view(panels, spans, n_blocks, BLOCK, -1, PANEL)
    body[..., form.subscale_bytes :].copy_(_words(codes, form.bits))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return codes (..., BLOCK, bytes of one, PANEL) as they lie in a block: (..., bytes)."""
    if bits >= 8:
        return codes.transpose(-1, -2).flatten(-3)
    codes = codes[..., 0, :]
    words = _joined(codes & 15, 4)
    if bits > 4:
        words = torch.cat([words, _joined(codes >> 4, bits - 4)], dim=-2)
    return words.contiguous().view(torch.uint8).flatten(-2)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Join codes (..., BLOCK, PANEL) of so many bits into int32 (..., words, PANEL)."""
    per_word = 32 // bits
    *outer, n, outputs = codes.shape
    split = codes.to(torch.int32).reshape(*outer, n // per_word, per_word, outputs)
    shifts = torch.arange(per_word, dtype=torch.int32) * bits
    found: Tensor = (split << shifts[:, None]).sum(-2, dtype=torch.int32)
    return found


def _nibbles(packed: Tensor) -> Tensor:
    """(blocks, 16) as 32 codes: low halves, then high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(words: Tensor) -> Tensor:
    """(blocks, 4) as 32 codes of 0 or 16."""
    bit = torch.arange(8, dtype=torch.uint8)
    return ((words[:, :, None] >> bit & 1) << 4).flatten(1)


def _f16(raw: Tensor) -> _Blocks:
    return _Blocks(raw.view(len(raw), BLOCK * 2), raw)


def _q8_0(raw: Tensor) -> _Blocks:
    return _Blocks(raw[:, 2:], raw[:, :2])


def _q4_0(raw: Tensor) -> _Blocks:
    return _Blocks(_nibbles(raw[:, 2:]), raw[:, :2])


def _q4_1(raw: Tensor) -> _Blocks:
    return _Blocks(_nibbles(raw[:, 4:]), raw[:, :4])


def _q5_0(raw: Tensor) -> _Blocks:
    return _Blocks(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), raw[:, :2])


def _q5_1(raw: Tensor) -> _Blocks:
    return _Blocks(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), raw[:, :4])


def _six_bits(packed: Tensor) -> Tensor:
    """The scales and minima of K-types, (blocks, 12) as (blocks, 2, 8)."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=1)
    return torch.stack([scales, least], dim=1)


def _nibbles_of_k(packed: Tensor) -> Tensor:
    """(blocks, 128) as 256 codes: for each 32 bytes low halves, then high ones."""
    groups = packed.view(-1, 4, 1, 32)
    return torch.cat([groups & 15, groups >> 4], dim=2).flatten(1)


def _q4_k(raw: Tensor) -> _Blocks:
    codes = _nibbles_of_k(raw[:, 16:].contiguous())
    return _Blocks(codes, raw[:, :4], _six_bits(raw[:, 4:16]))


def _q5_k(raw: Tensor) -> _Blocks:
    bit = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (raw[:, 16:48].view(-1, 1, 32) >> bit & 1) << 4
    codes = _nibbles_of_k(raw[:, 48:].contiguous()) | fifth.flatten(1)
    return _Blocks(codes, raw[:, :4], _six_bits(raw[:, 4:16]))


def _q6_k(raw: Tensor) -> _Blocks:
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    return _Blocks((low | high << 4).flatten(1), raw[:, 208:], raw[:, None, 192:208])


_TAKEN_APART: dict[str, Callable[[Tensor], _Blocks]] = {
    "F16": _f16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
