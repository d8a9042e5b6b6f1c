"""What adapters cost on a GPU: microseconds of a layer's LoRA kernels, and over its linear layers.

Layers of an 8B Llama in bfloat16 with queries, keys and values as one matrix, gate and up as
another, each adapted, by CUDA graph. There are so many layers that no cache holds their matrices.
What `SPLIT` of `kernels/gpu/lora.py` should be is to be seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import Scratch
from ballast.kernels.gpu.lora import GpuAdaptedRows, GpuLoraGroup
from ballast.kernels.gpu.staging import Staged
from ballast.kernels.lora import LoraMatrices, LoraTarget
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.models.gpu.adapters import lora
from benchmarks.common import finish, options
from benchmarks.gpu_device import Gpu

RANKS = (16, 64)
ADAPTERS = 8
LAYERS = 4
BATCHES = {"decode_1_of_1": (1, 1), "decode_32_of_1": (32, 1), "decode_32_of_8": (32, 8)}
CHUNKS = {"prefill_2048_of_4": (2048, 4)}
"""Rows, and adapters among them."""
SHAPES = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
"""Inputs, and outputs of the modules, of each matrix."""


class Timed(Protocol):
    """`Gpu`, as far as it is asked here."""

    device: torch.device

    def seconds(self, work: Callable[[], object], times: int) -> float: ...


@dataclass
class Model:
    """LoraMatrices (outputs, inputs) of some layers, and what adapters add to each."""

    weights: list[Tensor]
    groups: list[GpuLoraGroup]
    kept: list[Tensor]

    @classmethod
    def of(
        cls, shapes: tuple[tuple[int, tuple[int, ...]], ...], rank: int, device: torch.device
    ) -> Model:
        made = cls([], [], [])

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        for inputs, outputs in shapes * LAYERS:
            targets, column = [], 0
            for n in outputs:
                entries: list[LoraMatrices | None] = []
                for _ in range(ADAPTERS):
                    a, b = random(rank, inputs), random(rank, n)
                    made.kept += (a, b)
                    entries.append(LoraMatrices(a.data_ptr(), b.data_ptr(), rank, 0.5))
                targets.append(LoraTarget(n, tuple(entries), column))
                column += n
            made.weights.append(random(column, inputs))
            made.groups.append(GpuLoraGroup(inputs, tuple(targets)))
        return made

    def works(self, n: int, rows: GpuAdaptedRows) -> tuple[Callable[[], None], Callable[[], None]]:
        """All that adapters add to `n` rows, and all that their linear layers multiply."""
        device = self.weights[0].device
        kernels = lora(
            self.groups,
            torch.bfloat16,
            device,
            partial(cuda_tensor_at, device=device),
            Scratch(device),
        )

        def zeros(width: int) -> Tensor:
            return torch.zeros(n, width, device=device, dtype=torch.bfloat16)

        x = {inputs: zeros(inputs).normal_() for inputs in {g.inputs for g in self.groups}}
        y = [zeros(g.width) for g in self.groups]

        def add() -> None:
            for i, group in enumerate(self.groups):
                kernels.add(i, rows, x[group.inputs], y[i])

        def multiply() -> None:
            for group, weight in zip(self.groups, self.weights, strict=True):
                linear(x[group.inputs], weight)

        return add, multiply


def rows_of(rows: int, adapters: int, decodes: bool, device: torch.device) -> GpuAdaptedRows:
    """As many of each of so many adapters, in turn."""
    bucket = Bucket.decode(rows, 1, ADAPTERS)
    if not decodes:
        bucket = Bucket.holding([rows], rows, 1, ADAPTERS)
    staged = Staged({**GpuAdaptedRows.sizes(bucket), "end": ((1,), torch.int32)}, device)
    both = GpuAdaptedRows.both(staged.tensors, bucket)
    assert both is not None
    host = staged.host()
    for one in both:
        one.fill(host, np.arange(rows) % adapters, bucket.adapted_rows)
    staged.send(4)
    return both[0]


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same as a CUDA graph; kernels are compiled before."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure(
    gpu: Timed,
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = SHAPES,
    capture: Callable[[Callable[[], None]], Callable[[], None]] = captured,
    times: int = 20,
) -> dict[str, dict[str, float]]:
    """By rank and batch."""
    found: dict[str, dict[str, float]] = {}
    for rank in RANKS:
        model = Model.of(shapes, rank, gpu.device)
        for name, (n, adapters) in (BATCHES | CHUNKS).items():
            rows = rows_of(n, adapters, name in BATCHES, gpu.device)
            works = (capture(work) for work in model.works(n, rows))
            ours, theirs = (gpu.seconds(work, times) for work in works)
            found[f"rank_{rank}_{name}"] = {
                "microseconds_a_layer": ours / LAYERS * 1e6,
                "over_linear": ours / theirs,
            }
    return found


def main() -> None:
    args = options(__doc__)
    finish(args, "gpu_lora", measure(Gpu(), times=5 if args.quick else 20))


if __name__ == "__main__":
    main()
