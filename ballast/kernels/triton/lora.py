"""Launch the Triton kernels of LoRA, one group of linear modules after the other.

Implements `Lora`; used by `models.gpu.adapters`. Not tuned yet. With TRITON_INTERPRET=1
(set before this module is imported) it runs on CPU tensors, slowly, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ballast.core.units import ceil_div
from ballast.kernels.gpu.attention_plan import FEW_ROWS, MANY_ROWS
from ballast.kernels.gpu.batch import Scratch
from ballast.kernels.gpu.lora import (
    SPLIT,
    TILE_FIELDS,
    GpuAdaptedRows,
    GpuLoraGroup,
    splits,
    tables,
)
from ballast.kernels.triton import lora_code as code
from ballast.kernels.triton.attention import widened

LOADED = 16
"""Bytes that one thread loads at once at best: matrices begin at multiples of more."""
LEAST_RANKS, MOST_RANKS = 16, 64
"""Ranks at once: what a matrix product takes at least, and what fits beside the rest."""


@dataclass(frozen=True, slots=True)
class _Tables:
    matrices: Tensor
    scales: Tensor
    columns: Tensor
    ranks: int
    """At once, a power of two."""
    rank: int
    """Ranks of a row in `t`."""
    outputs: int
    """Most of any target."""
    step: int
    adapters: int


class TritonLora:
    """Implements `Lora`."""

    replayable: ClassVar[bool] = True

    def __init__(
        self,
        groups: Sequence[GpuLoraGroup],
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        self._groups = tuple(groups)
        self._tables = [_tables(group, device) for group in groups]
        self._torch_dtype, self._scratch = dtype, scratch
        self._dtype = getattr(tl, str(dtype).removeprefix("torch."))
        self._widen = widened(dtype, device)
        self._floats = {
            decodes: max(
                len(group.targets) * splits(group.inputs, made.rank, decodes) * made.rank
                for group, made in zip(self._groups, self._tables, strict=True)
            )
            for decodes in (False, True)
        }
        """Elements of `t` for each row of any group."""
        self._kept: list[Tensor] = []
        """All that jobs had: recorded graphs may use it."""

    def add(self, group: int, rows: GpuAdaptedRows, x: Tensor, y: Tensor) -> None:
        of, made = self._groups[group], self._tables[group]
        of.check(rows, x, y, self._torch_dtype)
        if not rows.programs or not len(x):
            return
        parts = splits(of.inputs, made.rank, rows.decodes)
        t = self._between(len(rows.order) * self._floats[rows.decodes])
        m = FEW_ROWS if rows.decodes else MANY_ROWS
        t_row = len(of.targets) * parts * made.rank
        chosen = sizes(m, made.ranks, self._torch_dtype)
        common = {
            "ADAPTERS": made.adapters,
            "M": m,
            "R": made.ranks,
            "FIELDS": TILE_FIELDS,
            "WIDEN": self._widen,
            "DTYPE": self._dtype,
            "ALIGNED": LOADED,
            "num_warps": chosen["num_warps"],
        }
        shrinks = (rows.programs, len(of.targets) * parts, made.rank // made.ranks)
        code.shrink_code[shrinks](
            x,
            t,
            rows.order,
            rows.tiles,
            made.matrices,
            x.stride(0),
            of.inputs,
            ceil_div(ceil_div(of.inputs, parts), SPLIT) * SPLIT,
            parts,
            made.rank,
            t_row,
            K=chosen["K"],
            **common,
        )
        expands = (rows.programs, ceil_div(made.outputs, chosen["N"]), len(of.targets))
        code.expand_code[expands](
            y,
            t,
            rows.order,
            rows.tiles,
            made.matrices,
            made.scales,
            made.columns,
            y.stride(0),
            parts,
            made.rank,
            t_row,
            N=chosen["N"],
            STEP=made.step,
            **common,
        )

    def _between(self, n: int) -> Tensor:
        if not self._kept or len(self._kept[-1]) < n:
            self._kept.append(self._scratch.tensor("lora", (n,), torch.float32, common=True))
        return self._kept[-1]


def sizes(rows: int, ranks: int, dtype: torch.dtype) -> dict[str, int]:
    """Inputs and outputs at once, and warps, for so many rows and ranks at once."""
    wide = dtype.itemsize > 2
    return {"K": 64 if wide else 128, "N": 64 if wide else 128, "num_warps": 4}


def _tables(group: GpuLoraGroup, device: torch.device) -> _Tables:
    matrices, scales, columns = (torch.from_numpy(made).to(device) for made in tables(group))
    ranks = min(MOST_RANKS, max(LEAST_RANKS, int(triton.next_power_of_2(group.rank))))
    numbers = [n for t in group.targets for n in (t.outputs, t.column)]
    step = next(s for s in (16, 8, 4, 2, 1) if not any(n % s for n in numbers))
    return _Tables(
        matrices,
        scales,
        columns,
        ranks,
        ceil_div(group.rank, ranks) * ranks,
        max(t.outputs for t in group.targets),
        step,
        len(group.targets[0].adapters),
    )
