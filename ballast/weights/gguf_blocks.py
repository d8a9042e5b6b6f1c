"""Dequantise blocks of GGUF files, by the formulas of ggml in float32.

Those of `transformers` where it has them; Q5_0 and Q5_1 are here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ballast.core.errors import UnsupportedModel
from ballast.fleet.gguf_header import BLOCK_PREFIX, TYPES, TensorType

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
    found: Tensor = dequantize(data, _NUMBERS[kind.name], torch.float32)
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
