"""LoRA on CPU: y[row] += scale * (x[row] A^T) B^T, with an adapter of its own for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ballast.core.errors import BrokenPromise
from ballast.memory.tensor import tensor_at


@dataclass(frozen=True, slots=True)
class Matrices:
    """What one adapter adds to one linear module, by address: A (rank, K), B^T (rank, N)."""

    a: int
    b: int
    rank: int
    scale: float


class AdapterRows:
    """Which rows of a batch go through which adapter. Rows of adapter -1 are left alone."""

    def __init__(self, adapters: Sequence[int]) -> None:
        self.n_rows = len(adapters)
        index = np.asarray(adapters, np.int64)
        self.groups = [
            (int(a), torch.from_numpy(np.flatnonzero(index == a)))
            for a in np.unique(index)
            if a >= 0
        ]


class LoraTarget:
    """One linear module, K inputs and N outputs, and what each adapter adds to it, if any."""

    def __init__(
        self, k: int, n: int, dtype: torch.dtype, adapters: Sequence[Matrices | None]
    ) -> None:
        self.k, self.n, self.dtype = k, n, dtype
        self.adapters = tuple(adapters)

    def add(self, rows: AdapterRows, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.shape != (rows.n_rows, self.k) or y.shape != (rows.n_rows, self.n):
            raise BrokenPromise("rows")
        for adapter, index in rows.groups:
            entry = self.adapters[adapter]
            if entry is not None:
                a = tensor_at(entry.a, (entry.rank, self.k), self.dtype).float()
                b = tensor_at(entry.b, (entry.rank, self.n), self.dtype).float()
                t = (x[index].float() @ a.t()) * entry.scale
                y[index] = (y[index].float() + t @ b).to(y.dtype)
