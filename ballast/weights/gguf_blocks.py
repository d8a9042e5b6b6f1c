"""Take rows of GGUF's blocks apart, and dequantise them by the formulas of ggml in float32.

The formulas are those of `transformers` where it has them; Q5_0 and Q5_1 are here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ballast.core.errors import UnsupportedModel
from ballast.fleet.gguf_header import BLOCK_PREFIX, TYPES, TensorType
from ballast.kernels.panel_forms import kind_of
from ballast.kernels.quantised import PackedRows

_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
BLOCKS: dict[str, TensorType] = {
    BLOCK_PREFIX + kind.name: kind for kind in TYPES.values() if kind.elements > 1
}
"""Types in blocks, by a stored tensor's dtype."""


def dequantise(data: Tensor, kind: TensorType) -> Tensor:
    """Return the elements, float32, of whole blocks: `data` is uint8, one-dimensional."""
    own = _OWN.get(kind.name)
    if own is not None:
        return own(data.view(-1, kind.n_bytes)).reshape(-1)
    try:
        from transformers.integrations.gguf.dequant import dequantize
    except ImportError as error:
        raise UnsupportedModel("GGUF: this version of transformers cannot read it") from error
    try:
        found: Tensor = dequantize(data, _NUMBERS[kind.name], torch.float32)
    except ValueError as error:  # a type that came later
        reason = f"GGUF: {kind.name}: this version of transformers does not dequantise it"
        raise UnsupportedModel(reason) from error
    return found.reshape(-1)


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Return 32 numbers of 0 to 31 for each block, of their low four bits and their high bits."""
    fours = torch.cat([low & 0xF, low >> 4], dim=1)
    bit = torch.arange(8, dtype=torch.uint8)
    fifths = (high[:, :, None] >> bit & 1).reshape(len(high), 32)
    return (fours | fifths << 4).float()


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 6:22], blocks[:, 2:6]) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 8:24], blocks[:, 4:8]) + _half(blocks, 2)


_OWN: dict[str, Callable[[Tensor], Tensor]] = {"Q5_0": _q5_0, "Q5_1": _q5_1}


def take_apart(raw: Tensor, name: str) -> PackedRows:
    """Take rows of a type's blocks apart: `raw` is uint8 (n, bytes of a row)."""
    n, name = len(raw), kind_of(name)
    if name == "F16":
        return PackedRows(raw, raw.view(torch.float16))
    kind = TYPES[_NUMBERS[name]]
    scales, codes, subscales = _TAKEN_APART[name](raw.reshape(-1, kind.n_bytes))
    halves = scales.contiguous().view(torch.float16).view(n, -1)
    more = None if subscales is None else subscales.reshape(n, -1)
    return PackedRows(codes.reshape(n, -1), halves, subscales=more)


def _nibbles(packed: Tensor) -> Tensor:
    """(blocks, 16) as 32 codes: low halves, then high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(words: Tensor) -> Tensor:
    """(blocks, 4) as 32 codes of 0 or 16."""
    bit = torch.arange(8, dtype=torch.uint8)
    return ((words[:, :, None] >> bit & 1) << 4).flatten(1)


_Blocks = tuple[Tensor, Tensor, Tensor | None]
"""uint8 (blocks, ...): one or two float16, codes, and subscales (blocks, parts, subscales)."""


def _q8_0(raw: Tensor) -> _Blocks:
    return raw[:, :2], raw[:, 2:], None


def _q4_0(raw: Tensor) -> _Blocks:
    return raw[:, :2], _nibbles(raw[:, 2:]), None


def _q4_1(raw: Tensor) -> _Blocks:
    return raw[:, :4], _nibbles(raw[:, 4:]), None


def _q5_0_apart(raw: Tensor) -> _Blocks:
    return raw[:, :2], _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), None


def _q5_1_apart(raw: Tensor) -> _Blocks:
    return raw[:, :4], _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), None


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
    return raw[:, :4], codes, _six_bits(raw[:, 4:16])


def _q5_k(raw: Tensor) -> _Blocks:
    bit = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (raw[:, 16:48].view(-1, 1, 32) >> bit & 1) << 4
    codes = _nibbles_of_k(raw[:, 48:].contiguous()) | fifth.flatten(1)
    return raw[:, :4], codes, _six_bits(raw[:, 4:16])


def _q6_k(raw: Tensor) -> _Blocks:
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    return raw[:, 208:], (low | high << 4).flatten(1), raw[:, None, 192:208]


_TAKEN_APART: dict[str, Callable[[Tensor], _Blocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0_apart,
    "Q5_1": _q5_1_apart,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
