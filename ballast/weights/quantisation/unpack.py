"""Take the rows of quantised matrices apart, in each format of safetensors.

Inputs are in the order of the matrix, or of its groups, where it has an index of these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ballast.kernels.panel_forms import PanelForm, form_of_name
from ballast.kernels.quantised import PackedRows
from ballast.weights.quantisation.config import AWQ, GPTQ, MXFP4, NF4, PACKED, SCALED
from ballast.weights.quantisation.formats import input_order
from ballast.weights.stored_tensor import Packing, StoredTensor

Read = Callable[[StoredTensor], Tensor]
"""Reads a tensor of the files, in its shape and dtype."""

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Dtypes of the tensors that matrices are made of."""
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight outputs a word has, from its lowest bits on."""


def rows_of(matrix: StoredTensor, read: Read) -> PackedRows:
    """Take the rows of one matrix apart: those that are stored, where it is `transposed`."""
    packing = matrix.packing
    assert packing is not None, "a matrix of one tensor"
    n, k = matrix.shape[::-1] if matrix.transposed else matrix.shape

    def part(role: str) -> Tensor | None:
        stored = packing.part(role)
        return None if stored is None else read(stored)

    rows = _TAKEN_APART[packing.format](packing, part, n, k)
    index = packing.part("index")
    if index is None:
        return rows
    order = torch.from_numpy(input_order(index, k, form_of_name(packing.form).span))
    return rows._replace(codes=rows.codes[:, order.long()], order=order)


Part = Callable[[str], Tensor | None]


def _of(part: Part, role: str) -> Tensor:
    found = part(role)
    assert found is not None, f"a matrix without {role}"
    return found


def _gptq(packing: Packing, part: Part, n: int, k: int) -> PackedRows:
    codes = _stream(_of(part, "codes").T, packing.bits)[:, :k]
    zeros = _stream(_of(part, "zeros"), packing.bits)
    if packing.numbers:
        zeros = (zeros.int() + int(packing.numbers[0]) & (1 << packing.bits) - 1).to(torch.uint8)
    return PackedRows(codes.contiguous(), _of(part, "scales").T, zeros.T)


def _awq(packing: Packing, part: Part, n: int, k: int) -> PackedRows:
    place = torch.tensor(_AWQ_ORDER).argsort()

    def outputs(words: Tensor) -> Tensor:
        eights = _stream(words, 4).view(len(words), -1, 8)
        return eights[..., place].flatten(1).T.contiguous()

    codes, zeros = outputs(_of(part, "codes")), outputs(_of(part, "zeros"))
    return PackedRows(codes, _of(part, "scales").T, zeros)


def _compressed(packing: Packing, part: Part, n: int, k: int) -> PackedRows:
    bits, form = packing.bits, form_of_name(packing.form)
    codes = _stream(_of(part, "codes"), bits)[:, :k]
    zeros = part("zeros")
    half = 1 << bits - 1
    if zeros is not None and zeros.dtype == torch.int8:
        zeros = (zeros.int() + half).to(torch.uint8)
    elif zeros is not None:
        zeros = _stream(zeros.T, bits).T[:n].contiguous()
    elif form.has_zeros:
        zeros = torch.full(_of(part, "scales").shape, half, dtype=torch.uint8)
    elif form.bits == 8:
        codes = codes ^ half  # of two's complement
    return PackedRows(codes.contiguous(), _of(part, "scales"), zeros)


def _scaled(packing: Packing, part: Part, n: int, k: int) -> PackedRows:
    form = form_of_name(packing.form)

    def spread(given: Tensor) -> Tensor:
        each = given if given.dim() == 2 else given.reshape(-1, 1)
        return each.repeat_interleave(packing.scale_rows, 0)[:n]

    scales = _of(part, "scales")
    for factor in packing.numbers:
        scales = scales * factor
    codes, zeros = _of(part, "codes").view(torch.uint8), part("zeros")
    if zeros is None:
        return PackedRows(codes, spread(scales))
    assert form.has_zeros
    return PackedRows(codes ^ 128, spread(scales), spread(zeros.view(torch.uint8) ^ 128))


def _four_bits(packing: Packing, part: Part, n: int, k: int) -> PackedRows:
    pairs, form = _of(part, "codes").flatten(), form_of_name(packing.form)
    codes = torch.stack([pairs >> 4, pairs & 15], 1).view(n, k)
    scales, (offset, nested) = _of(part, "scales"), packing.numbers
    if scales.dtype == torch.uint8:
        outer = _of(part, "nested").float().repeat_interleave(int(nested))[: len(scales)]
        scales = _of(part, "nested_values").float()[scales.int()] * outer + offset
    values = part("values")
    _check_values(packing, values, form)
    return PackedRows(codes, scales.float().view(n, -1))


def _check_values(packing: Packing, values: Tensor | None, form: PanelForm) -> None:
    """Raise CheckpointError for a table of values that is not the format's."""
    stored = packing.part("values")
    if values is None or stored is None:
        return
    expected = torch.tensor(form.values)
    if values.shape != expected.shape or not torch.allclose(values.float(), expected, atol=1e-6):
        raise stored.error("its values are not those of its type")


def _mxfp4(packing: Packing, part: Part, n: int, k: int) -> PackedRows:
    pairs = _of(part, "codes").view(n, -1)
    codes = torch.stack([pairs & 15, pairs >> 4], 2).view(n, k)
    return PackedRows(codes, _of(part, "scales").view(n, -1))


def _stream(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of so many bits in rows of int32, one after the other: uint8."""
    columns = words.shape[1]
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        found = words[:, :, None] >> shifts & (1 << bits) - 1
        return found.to(torch.uint8).flatten(1)
    wide = words.long() & 0xFFFFFFFF
    at = torch.arange(columns * 32 // bits) * bits
    word, shift = at // 32, at % 32
    after = (word + 1).clamp(max=columns - 1)
    both = wide[:, word] | wide[:, after] << 32
    return (both >> shift & (1 << bits) - 1).to(torch.uint8)


_TAKEN_APART: dict[str, Callable[[Packing, Part, int, int], PackedRows]] = {
    GPTQ: _gptq,
    AWQ: _awq,
    PACKED: _compressed,
    SCALED: _scaled,
    NF4: _four_bits,
    MXFP4: _mxfp4,
}
