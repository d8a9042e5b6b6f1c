"""HybridGEMM (C2CServe, 5.2): is it right, what does it move, and what is it bound by?

Anywhere: outputs for shares of `os_share` over shapes, bit by bit, and against float64 (`correct`);
in Triton's interpreter where there is no GPU. The traffic that `core/gemm_traffic.py` models for
figure 4b's GEMM. On a GPU: weights of an 8B model's down projection in pinned memory, M from 1 to
8192: milliseconds by share, of cuBLAS on the same pointer, of copy-then-GEMM, and resident.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ballast.core.gemm_traffic import GemmShape, GemmTile, hybrid
from benchmarks.common import finish, options
from benchmarks.gpu_apart import attempted
from benchmarks.interpreted import chained_dots

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SMALL_SHAPES = ((1, 48, 80), (5, 100, 33), (130, 70, 256), (65, 129, 300))
"""M, N, K: none a multiple of its tile."""
GPU_SHAPES = ((1, 4096, 4096), (129, 1000, 4100), (1000, 4096, 14336), (4097, 512, 1024))
NEAR = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
"""Of a product's norm: the output is rounded to 8 or 11 bits."""
FIGURE_4B = GemmShape(m=5120, n=8192, k=8192)
FIGURE_TILES = (GemmTile(128, 128, 64), GemmTile(128, 128, 512))
MULTIPROCESSORS = 132
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DOWN = (4096, 14336)
"""N and K."""
CANDIDATES: tuple[dict[str, int], ...] = (
    {},
    {"ws_columns": 64},
    {"ws_rows": 64, "depth": 128, "warps": 4, "os_rows": 64},
    {"ws_rows": 64, "os_rows": 64, "os_columns": 64, "warps": 4, "programs": 2},
)
"""Other tiles than those that serve, with `--tiles`."""


def correctness(device: torch.device) -> dict[str, Any]:
    """Outputs of every share against those of the first, and against float64."""
    from ballast.kernels.triton.hybrid_gemm import TILES, HybridTiles, hybrid_gemm

    on_gpu = device.type == "cuda"
    tiles = TILES if on_gpu else HybridTiles(64, 32, 64, 16, 32, warps=4)
    unequal, worst, outputs = 0, {str(dtype): 0.0 for dtype in NEAR}, 0
    within = True
    for m, n, k in GPU_SHAPES if on_gpu else SMALL_SHAPES:
        for dtype, near in NEAR.items():
            torch.manual_seed(m + n + k)
            x, w = torch.randn(m, k).to(dtype).to(device), torch.randn(n, k).to(dtype)
            w = w.pin_memory() if on_gpu else w
            with chained_dots():
                made = [hybrid_gemm(x, w.data_ptr(), n, share, tiles) for share in SHARES]
            exact = x.double() @ w.to(device).double().T
            error = float((made[0].double() - exact).norm() / exact.norm())
            worst[str(dtype)] = max(worst[str(dtype)], error)
            within &= error < near
            unequal += sum(int((other != made[0]).sum()) for other in made[1:])
            outputs += m * n * len(made[1:])
    return {
        "correct": within and unequal == 0,
        "outputs": outputs,
        "unequal": unequal,
        "largest_error": worst,
    }


def modelled() -> dict[str, dict[str, float]]:
    """Gigabytes of the GEMM of figure 4b by share."""
    found = {}
    for share in SHARES:
        traffic = hybrid(FIGURE_4B, *FIGURE_TILES, share, MULTIPROCESSORS)
        found[f"{share:g}"] = {"link_gb": traffic.link / 1e9, "device_gb": traffic.device / 1e9}
    return found


def timed(rows: Sequence[int], times: int) -> dict[str, Any]:
    """Milliseconds on this GPU, by M; what each would take if it were bound by its link alone, or
    by the device's arithmetic."""
    from benchmarks.gpu_device import Gpu

    gpu = Gpu()
    n, k = DOWN
    link = gpu.link_bandwidth()
    gpu.give_back()
    weights = torch.randn(n, k).mul_(k**-0.5).to(torch.bfloat16).pin_memory()
    found: dict[str, Any] = {"gpu": gpu.facts()["gpu"], "link_bytes_per_second": link}
    found["weight_read_ms"] = 1e3 * weights.nbytes / link
    found["by_rows"] = {m: _of_rows(gpu, weights, m, times) for m in rows}
    return found


def timed_tiles(rows: Sequence[int]) -> dict[str, dict[int, dict[str, Any]]]:
    """Milliseconds by tiles, M and share."""
    from ballast.kernels.triton.hybrid_gemm import TILES, hybrid_gemm
    from benchmarks.gpu_device import Gpu

    gpu = Gpu()
    n, k = DOWN
    weights = torch.randn(n, k).mul_(k**-0.5).to(torch.bfloat16).pin_memory()
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for candidate in CANDIDATES:
        name = " ".join(f"{key} {value}" for key, value in candidate.items()) or "as they serve"
        by_rows = found[name] = {}
        for m in rows:
            x = torch.randn(m, k, dtype=torch.bfloat16, device=gpu.device)
            result = by_rows[m] = {}
            for share in (0.0, 0.5, 1.0):
                tiles = replace(TILES, **candidate)
                work = partial(hybrid_gemm, x, weights.data_ptr(), n, share, tiles)
                result[f"{share:g}"] = attempted(partial(_milliseconds, gpu, work))
    return found


def _milliseconds(gpu: Any, work: Callable[[], Tensor]) -> dict[str, float]:
    return {"ms": 1e3 * gpu.seconds(work, 5)}


def _of_rows(gpu: Any, weights: Tensor, m: int, times: int) -> dict[str, float]:
    from ballast.kernels.triton.hybrid_gemm import hybrid_gemm
    from ballast.memory.cuda.tensor import cuda_tensor_at

    n, k = weights.shape
    x = torch.randn(m, k, dtype=torch.bfloat16, device=gpu.device)
    mapped = cuda_tensor_at(weights.data_ptr(), (n, k), weights.dtype, gpu.device)
    resident = torch.empty_like(weights, device=gpu.device)

    def copied() -> Tensor:
        resident.copy_(weights, non_blocking=True)
        return torch.nn.functional.linear(x, resident)

    workspace = torch.empty(m * n, dtype=torch.float32, device=gpu.device)
    contenders: dict[str, Callable[[], Tensor]] = {
        f"os_share_{share:g}": partial(
            hybrid_gemm, x, weights.data_ptr(), n, share, workspace=workspace
        )
        for share in SHARES
    }
    contenders["cublas_on_the_same_pointer"] = partial(torch.nn.functional.linear, x, mapped)
    contenders["copy_then_gemm"] = copied
    contenders["resident_gemm"] = partial(torch.nn.functional.linear, x, resident)
    result = {name: 1e3 * gpu.seconds(work, times) for name, work in contenders.items()}
    gpu.give_back()
    return result


def table_of(result: dict[str, Any]) -> Table:
    table = Table("rows", *(f"{s:g}" for s in SHARES), "cuBLAS", "copied", "resident")
    for rows, found in result["timed"]["by_rows"].items():
        table.add_row(str(rows), *(f"{ms:.2f}" for ms in found.values()))
    table.title = (
        f"ms by os_share, {result['timed']['gpu']}; weights once over the link: "
        f"{result['timed']['weight_read_ms']:.2f}"
    )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tiles", action="store_true", help="time other tiles, too")

    args = options(__doc__, argv, extra)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    result = {
        **correctness(torch.device("cuda", 0) if on_gpu else torch.device("cpu")),
        "modelled": modelled(),
    }
    if on_gpu:
        result["timed"] = timed(ROWS[::3] if args.quick else ROWS, 3 if args.quick else 7)
    if on_gpu and args.tiles:
        result["tiles"] = timed_tiles((1, 256, 2048))
    finish(args, "hybrid_gemm", result, table_of(result) if on_gpu else None)
    return 0 if result["correct"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
