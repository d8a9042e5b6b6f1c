"""Sample by Gumbel-max over whole rows on a GPU, where the kernel's error bounds allow a decision.

Implements `GumbelMax`; chosen by `gpu.sampling`, which samples undecided rows on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ballast.core.request import Sampling
from ballast.kernels.triton import sampling_code as code

Array = np.ndarray[Any, Any]

BLOCK = 2048
"""Tokens of one program. Not tuned yet."""


class TritonGumbelMax:
    """Implements `ballast.kernels.gpu.sampling.GumbelMax`."""

    def __init__(self, block: int = BLOCK) -> None:
        """`block`: a power of two."""
        self._block = block

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        params: Sequence[Sampling],
        positions: Sequence[int],
    ) -> list[int | None]:
        return decided(*self._found(logits, rows, params, positions))

    def bounds(
        self,
        logits: Tensor,
        rows: Sequence[int],
        params: Sequence[Sampling],
        positions: Sequence[int],
    ) -> tuple[Array, Array]:
        """Bounds, lower and upper, of the best exact score of each block: (rows, blocks) each."""
        found, _ = self._found(logits, rows, params, positions)
        return found[:, :, 1], found[:, :, 2]

    def _found(
        self,
        logits: Tensor,
        rows: Sequence[int],
        params: Sequence[Sampling],
        positions: Sequence[int],
    ) -> tuple[Array, Array]:
        n, vocab = len(rows), logits.shape[1]
        blocks = int(triton.cdiv(vocab, self._block))
        device = logits.device
        with np.errstate(over="ignore"):
            inverses = (1.0 / np.array([p.temperature for p in params])).astype(np.float32)
        keys = np.array(
            [
                (_signed(p.seed), position & 0xFFFFFFFF, p.choice & 0xFFFFFFFF)
                for p, position in zip(params, positions, strict=True)
            ],
            np.int64,
        )
        found = torch.empty((n, blocks, 4), dtype=torch.float32, device=device)
        tokens = torch.empty((n, blocks), dtype=torch.int32, device=device)
        code.gumbel_max_code[(n, blocks)](
            logits,
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.from_numpy(inverses).to(device),
            torch.from_numpy(keys).to(device),
            found,
            tokens,
            logits.stride(0),
            vocab,
            BLOCK=self._block,
            num_warps=8,
        )
        return found.cpu().numpy(), tokens.cpu().numpy()


def decided(found: Array, tokens: Array) -> list[int | None]:
    """The token of each row that is surely the best; None where another may be. Arrays as
    `gumbel_max_code` writes them."""
    row = np.arange(len(found))
    block = found[:, :, 0].argmax(1)
    least = found[row, block, 1]
    most = found[:, :, 2].copy()
    most[row, block] = found[row, block, 3]
    sure = least > most.max(1)
    best = tokens[row, block]
    return [int(token) if is_sure else None for token, is_sure in zip(best, sure, strict=True)]


def _signed(seed: int) -> int:
    """The same 64 bits, as int64 has them."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed
