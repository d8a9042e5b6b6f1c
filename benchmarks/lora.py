"""What adapters cost: the LoRA kernels over the linear layer that they add to.

Rank 16, layers of a 110M Llama (768 to 768, 768 to 2048, 2048 to 768), in turns with
`torch.nn.functional.linear` of the same shape (`over_linear`), and with the same sums in plain
torch, one adapter after the other (`over_torch`). Matrices are cold: each call takes the next of
so many layers that they do not fit into the caches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from ballast.kernels.lora import AdapterRows, LoraGroup, LoraMatrices, LoraTarget
from benchmarks.common import finish, interleave, options

RANK = 16
SHAPES = ((768, 768), (768, 2048), (2048, 768))
LAYER_BYTES = 128 << 20
BATCHES = {"decode_16_of_1": (16, 1), "decode_16_of_16": (16, 16), "prefill_512_of_4": (512, 4)}
"""Rows, and adapters among them."""


class Case:
    """Layers of one shape with their adapters, and a batch for them."""

    def __init__(self, k: int, n: int, rows: int, adapters: int, dtype: torch.dtype) -> None:
        count = max(2, LAYER_BYTES // (k * n * dtype.itemsize))
        self.weights = torch.randn(count, n, k).to(dtype)
        self.a = torch.randn(count, adapters, RANK, k).to(dtype)
        self.b = torch.randn(count, adapters, RANK, n).to(dtype)
        index = [i * adapters // rows for i in range(rows)]
        self.rows = AdapterRows(index)
        self.slices = [slice(index.index(i), rows - index[::-1].index(i)) for i in range(adapters)]
        self.groups = [
            LoraGroup(
                k,
                [
                    LoraTarget(
                        n,
                        tuple(
                            LoraMatrices(x.data_ptr(), y.data_ptr(), RANK, 1.0)
                            for x, y in zip(self.a[i], self.b[i], strict=True)
                        ),
                    )
                ],
                dtype,
            )
            for i in range(count)
        ]
        self.x = torch.randn(rows, k).to(dtype)
        self.y = torch.randn(rows, n).to(dtype)
        self._next = itertools.cycle(range(count))

    def lora(self, i: int) -> None:
        self.groups[i].add(self.rows, self.x, self.y)

    def linear(self, i: int) -> Tensor:
        return linear(self.x, self.weights[i])

    def torch(self, i: int) -> None:
        for j, part in enumerate(self.slices):
            self.y[part] += linear(self.x[part], self.a[i, j]) @ self.b[i, j]

    def timed(self, call: Callable[[int], object], calls: int) -> Callable[[], float]:
        def run() -> float:
            begun = time.perf_counter()
            for _ in range(calls):
                call(next(self._next))
            return (time.perf_counter() - begun) / calls

        return run


def main() -> None:
    args = options(__doc__)
    rounds, calls = (5, 10) if args.quick else (15, 20)
    result: dict[str, dict[str, dict[str, float]]] = {}
    with torch.inference_mode():
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
            for (k, n), (batch, (rows, adapters)) in itertools.product(SHAPES, BATCHES.items()):
                case = Case(k, n, rows, adapters, dtype)
                variants = {
                    v.__name__: case.timed(v, max(2, calls * 16 // rows))
                    for v in (case.lora, case.linear, case.torch)
                }
                taken = interleave(variants, rounds, warmup=1)
                result.setdefault(name, {})[f"{k}_{n}_{batch}"] = {
                    "microseconds": taken["lora"].median * 1e6,
                    "over_linear": taken["lora"].over(taken["linear"]).median,
                    "over_torch": taken["lora"].over(taken["torch"]).median,
                }
    finish(args, "lora", result)


if __name__ == "__main__":
    main()
