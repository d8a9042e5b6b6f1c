"""Round a matrix to few bits with a scale for each group of inputs, as compressed-tensors packs it.

Used by `fleet_delta` for differences that have no low rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ballast.core.units import ceil_div
from ballast.weights.packed_delta import GROUP

_CLIPPED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Scales that are tried for a group, over that which holds its largest element."""


class FewBits(NamedTuple):
    """A matrix (n outputs, k inputs), rounded."""

    bits: int
    packed: Tensor
    """int32 (n, words): codes of consecutive inputs, the first in the lowest bits."""
    scales: Tensor
    """bfloat16 (n, groups)"""
    rounded: Tensor
    """float32 (n, k): what it stands for."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that compressed-tensors stores for it, by the ends of their names."""
        shape = torch.tensor(self.rounded.shape)
        return {"packed": self.packed, "scale": self.scales, "shape": shape}


def few_bits(matrix: Tensor, bits: int) -> FewBits:
    """Round a matrix, float32, to 4 or 8 bits: each group of a row by the scale with the least
    error."""
    (n, k), most = matrix.shape, (1 << bits - 1) - 1
    groups = pad(matrix, (0, -k % GROUP)).view(n, -1, GROUP)
    whole = groups.abs().amax(-1, keepdim=True) / most
    least = torch.full_like(whole, torch.inf)
    scales, codes = torch.zeros_like(whole), torch.zeros_like(groups)
    for part in _CLIPPED:
        scale = (whole * part).bfloat16().float()
        tried = (groups / scale).nan_to_num(0.0).round().clamp(-most - 1, most)
        error = (tried * scale - groups).square().sum(-1, keepdim=True)
        better = error < least
        least, scales = torch.where(better, error, least), torch.where(better, scale, scales)
        codes = torch.where(better, tried, codes)
    per_word = 32 // bits
    stored = (codes.to(torch.int64) + most + 1).view(n, -1, per_word)[:, : ceil_div(k, per_word)]
    shifts = torch.arange(per_word) * bits
    packed = (stored << shifts).sum(-1).to(torch.int32)  # modulo 2^32
    rounded = (codes * scales).view(n, -1)[:, :k].contiguous()
    return FewBits(bits, packed, scales.squeeze(-1).bfloat16(), rounded)
