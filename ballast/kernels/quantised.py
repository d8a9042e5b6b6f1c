"""Pack rows of quantised matrices into panels, and build the tables of their kernels on CPU.

Used by `weights` to pack matrices and by `models` to run them. Each format of files takes its rows
apart (`PackedRows`); from there on all are treated alike. `ballast.kernels.panel_forms` has the
layout; all bits of codes and scales are kept, so that a weight is what the format defines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ballast.core.errors import BrokenPromise
from ballast.kernels import linear, linear_code
from ballast.kernels import quantised_code as code
from ballast.kernels import quantised_dots_code as dots
from ballast.kernels.panel_forms import (
    BLOCK,
    EXPONENTS,
    PANEL,
    PanelForm,
    form_of_name,
    is_rounded,
    number_of,
    order_at,
    packed_bytes,
    panel_bytes,
)

Array = np.ndarray[Any, Any]

_compiling = threading.Lock()
_LARGEST_EXPONENT = 252
"""Of a scale, as stored, with which all codes are finite: 6 x 2^125."""
_ROWS = 16 * PANEL
"""Rows that are packed at once, so that what is unpacked meanwhile stays small."""
_SCALE_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    EXPONENTS: torch.uint8,
}


class PackedRows(NamedTuple):
    """Rows of a matrix (n outputs, k inputs) in a form, taken apart."""

    codes: Tensor
    """uint8 (n, k); of float16 (n, 2 * k): the bytes of the weights."""
    scales: Tensor
    """(n, spans), in the dtype of the form's scales (exponents: uint8); with offsets
    (n, 2 * spans), after each scale its offset. Of float16 (n, k): the weights."""
    zeros: Tensor | None = None
    """uint8 (n, spans)"""
    subscales: Tensor | None = None
    """uint8 (n, spans * parts * subscales of a span)"""
    order: Tensor | None = None
    """int32 (k,): the indices of the inputs in the order of codes."""

    def map(self, function: Callable[[Tensor], Tensor]) -> PackedRows:
        """Return rows whose tensors, without the order, are each `function` of those here."""
        zeros = None if self.zeros is None else function(self.zeros)
        subscales = None if self.subscales is None else function(self.subscales)
        return PackedRows(function(self.codes), function(self.scales), zeros, subscales, self.order)


def tables(
    weights: Array, n: int, k: int, form: str, *, mode: int = linear.STORE, bias: Array | int = 0
) -> Array:
    """Build tables as `linear.tables`, for quantised panels of a form."""
    made = linear.tables(weights, n, k, mode=mode, bias=bias)
    made[:, linear_code.FORM] = number_of(form)
    made[:, linear_code.PANEL_BYTES] = panel_bytes(form, k)
    if at := order_at(form, n, k):
        made[:, linear_code.ORDER] = weights + at
    return made


def kernel(form: str) -> int:
    """Address of `void (int64 *table)` for tables of a form; compiles it if it is new."""
    with _compiling:
        if is_rounded(form):
            return dots.address_of("linear")
        return code.address_of("linear")


def embed_kernel() -> int:
    """Address of the kernel that reads rows of quantised panels (`layer_code.PANEL_FORM`)."""
    with _compiling:
        return code.address_of("embed")


def stacked(parts: Sequence[PackedRows]) -> PackedRows:
    """Return the rows of several matrices whose inputs are in the same order."""
    if len(parts) == 1:
        return parts[0]

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        there = [t for t in tensors if t is not None]
        return torch.cat(there) if there else None

    codes, scales, zeros, subscales, orders = zip(*parts, strict=True)
    return PackedRows(
        torch.cat(codes), torch.cat(scales), joined(zeros), joined(subscales), orders[0]
    )


def gated(rows: PackedRows) -> PackedRows:
    """Return rows of gates and then as many of ups interleaved as `linear.gated` does."""
    return rows.map(lambda part: linear.gated(*part.chunk(2)))


def pack(rows: PackedRows, name: str, k: int) -> Tensor:
    """Pack rows of a matrix into quantised panels: flat uint8; rows are padded with zeros."""
    form, n = form_of_name(name), len(rows.codes)
    spans, each = -(-k // form.span), form.span_bytes
    panels = -(-n // PANEL)
    whole = torch.zeros(packed_bytes(name, n, k), dtype=torch.uint8)
    packed = whole[: panels * spans * each].view(panels, spans, each)
    for first in range(0, n, _ROWS):
        some = _panel_rows(rows, first)
        target = packed[first // PANEL : first // PANEL + len(some.codes) // PANEL]
        _pack_spans(some, form, k, target)
    if form.is_ordered:
        if rows.order is None:
            raise BrokenPromise(f"rows in the form {name} without the order of their inputs")
        at = order_at(name, n, k)
        whole[at : at + 4 * k].view(torch.int32).copy_(rows.order)
    return whole


def is_finite(rows: PackedRows, name: str) -> bool:
    """Return whether all scales and codes are finite: then so are weights."""
    form = form_of_name(name)
    if form.scale == EXPONENTS:
        if int(rows.scales.max()) <= _LARGEST_EXPONENT:
            return True
        return bool(dequantise(rows, name).isfinite().all())
    finite = bool(rows.scales.isfinite().all())
    return finite and not (form.is_float8 and bool((rows.codes & 127 == 127).any()))


def dequantise(rows: PackedRows, name: str) -> Tensor:
    """Return the weights, float32 (n, k), of a form that is not GGUF's (`weights.gguf_blocks` has
    the formulas of those)."""
    form, (n, k) = form_of_name(name), rows.codes.shape
    if form.values:
        found = torch.tensor(form.values)[rows.codes.int()]
    elif form.is_float8:
        found = rows.codes.view(torch.float8_e4m3fn).float()
    elif form.bits == 8 and not form.has_zeros:
        found = rows.codes.view(torch.int8).float()
    else:
        found = rows.codes.float() - form.zero
    whole = pad(found, (0, -k % form.span)).view(n, -1, form.span)
    if rows.zeros is not None:
        whole = whole - rows.zeros[..., None].float()
    found = (whole * _numbers(rows.scales, form)[..., None]).flatten(1)[:, :k]
    if rows.order is None:
        return found
    in_order = torch.empty(n, k)
    in_order[:, rows.order.long()] = found
    return in_order


def _numbers(scales: Tensor, form: PanelForm) -> Tensor:
    """Return scales as float32."""
    if form.scale == EXPONENTS:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def _panel_rows(rows: PackedRows, first: int) -> PackedRows:
    """Return some rows from `first` on, with zeros up to the end of their last panel."""

    def padded(part: Tensor) -> Tensor:
        some = part[first : first + _ROWS]
        return pad(some, (0, 0, 0, -len(some) % PANEL))

    return rows.map(padded)


def _pack_spans(rows: PackedRows, form: PanelForm, k: int, target: Tensor) -> None:
    """Pack whole panels' rows into `target`: (panels, spans, bytes)."""
    panels, spans, _ = target.shape
    n_blocks = form.span // BLOCK

    def by_output(t: Tensor) -> Tensor:
        """(panels * PANEL, spans * more) as (panels, spans, more, PANEL)."""
        return t.view(panels, PANEL, spans, -1).movedim(1, -1)

    at = 0
    if form.bits != 16:
        scale = form.scale_bytes
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[scale]
        scales = rows.scales.to(_SCALE_DTYPES[form.scale or "F16"]).contiguous().view(dtype)
        at = PANEL * scale * (1 + form.has_offset)
        target[..., :at].view(dtype).view(panels, spans, -1, PANEL).copy_(by_output(scales))
    if rows.zeros is not None:
        target[..., at : at + PANEL].copy_(by_output(rows.zeros).squeeze(2))
        at += PANEL
    body = target[..., at:].view(panels, spans, n_blocks, form.block_bytes)
    if rows.subscales is not None:
        sub = by_output(rows.subscales).view(panels, spans, -1, n_blocks, form.subscales, PANEL)
        sub = sub.transpose(2, 3)
        there = body[..., : form.subscale_bytes]
        there.view(sub.shape).copy_(sub)
    width = 2 if form.bits == 16 else 1
    padded = pad(rows.codes, (0, spans * form.span * width - rows.codes.shape[1]))
    codes = by_output(padded).view(panels, spans, n_blocks, BLOCK, width, PANEL)
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
