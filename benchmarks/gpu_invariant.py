"""Batch-invariance on a GPU: do tokens depend on what else runs, and what does it cost?

On one GPU, in bfloat16:

- `tokens`: texts of a small fleet's requests, each served alone and all at once, on memory for two
  of three models; how many differ, invariant and not.
- `steps`: milliseconds of decode steps and prefills of an 8B model by CUDA graph, invariant and
  not, and the price in tokens a second.
- `gemms`: microseconds of an 8B layer's matrices by number of rows, of cuBLAS and of the invariant
  GEMM; whether the rows' bits are equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from ballast.bench.inprocess import InProcess
from ballast.core.request import Submission
from benchmarks.common import finish, options
from benchmarks.gpu_apart import attempted
from benchmarks.gpu_device import CONFIGS, PAGE, Gpu
from benchmarks.gpu_fleet import DEVICE, make_models, requests_for, tight
from benchmarks.gpu_model import Random

ROWS = (1, 4, 16, 64, 128, 256, 512, 2048)
MATRICES = {
    "q/k/v": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs."""
LAYERS = 4
"""Copies of a matrix that are gone through, so that no cache holds their weights."""
CONTEXT, SEQUENCES = 1024, 32


def gemms(gpu: Gpu) -> dict[str, Any]:
    from ballast.kernels.triton.gemm import invariant_gemm

    found: dict[str, Any] = {"unequal": 0}
    for name, (n, k) in MATRICES.items():
        weights = [
            torch.randn(n, k, device=gpu.device).mul_(k**-0.5).to(torch.bfloat16)
            for _ in range(LAYERS)
        ]
        x = torch.randn(ROWS[-1], k, device=gpu.device).to(torch.bfloat16)
        whole = invariant_gemm(x, weights[0])
        for m in ROWS:
            rows = x[:m].contiguous()
            found["unequal"] += int((invariant_gemm(rows, weights[0]) != whole[:m]).sum())
            same = linear(rows, weights[0]) == whole[:m]
            result = {"cublas": _each(gpu, partial(linear, rows), weights)}
            result["cublas_unequal"] = float((~same).float().mean())
            result["invariant"] = _each(gpu, partial(invariant_gemm, rows), weights)
            found[f"{name}, {m} rows"] = result
        gpu.give_back()
    return found


def _each(gpu: Gpu, multiply: Any, weights: list[torch.Tensor]) -> float:
    """Microseconds of one product, by CUDA graph."""

    def through() -> None:
        for matrix in weights:
            multiply(matrix)

    return 1e6 * gpu.seconds(gpu.replayed(through), 10) / len(weights)


def steps(gpu: Gpu) -> dict[str, Any]:
    """Milliseconds of the device, by what is computed and how."""
    found: dict[str, Any] = {}
    for impl in ("fused", "gemms", "invariant"):
        shape = (gpu.driver, gpu.device, CONFIGS["8B"], PAGE, SEQUENCES, CONTEXT + 64)
        with Random(*shape, impl=impl) as model, torch.inference_mode():
            jobs = {f"decode_of_{n}": model.decodes(n, CONTEXT) for n in (1, 8, SEQUENCES)}
            jobs |= {f"prefill_of_{n}": model.prefill(n) for n in (128, CONTEXT)}
            for name, work in jobs.items():
                batch = model.served.batch(work)
                run = partial(model.served._compute_logits, batch, batch.n_wanted)
                found.setdefault(name, {})[impl] = 1e3 * gpu.seconds(gpu.replayed(run), 10)
        gpu.give_back()
    for result in found.values():
        result["tokens_per_second"] = min(result["fused"], result["gemms"]) / result["invariant"]
    return found


def tokens(gpu: Gpu, invariant: bool) -> dict[str, int]:
    """Requests whose text differs between alone and in a crowd."""
    with tempfile.TemporaryDirectory() as home:
        models = make_models(Path(home), "bfloat16", 512, "auto")
        requests = requests_for(models, each=8)
        fleet = tight(models, replace(DEVICE, invariant=invariant, prefix_cache=False))
        with InProcess(fleet) as server:
            alone = {r.id: _text(server, replace(r, id=f"{r.id}/alone")) for r in requests}
            crowd = server.generate([replace(r, id=f"{r.id}/crowd") for r in requests])
            evictions = sum(m.evictions for m in server.device.snapshot().models)
        differ = sum(alone[r.id] != crowd[f"{r.id}/crowd"].tokens for r in requests)
        return {"requests": len(requests), "differ": differ, "evictions": evictions}


def _text(server: InProcess, request: Submission) -> Sequence[int]:
    return server.generate([request])[request.id].tokens


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv)
    gpu = Gpu()
    result: dict[str, Any] = {"gemms": attempted(partial(gemms, gpu))}
    gpu.give_back()
    result["steps"] = attempted(partial(steps, gpu))
    gpu.give_back()
    for name, invariant in (("invariant", True), ("not_invariant", False)):
        result[f"tokens_{name}"] = attempted(partial(tokens, gpu, invariant))
    finish(args, "gpu_invariant", result)
    differ = result["tokens_invariant"].get("differ", 1)
    return 1 if differ or result["gemms"].get("unequal", 1) else 0


if __name__ == "__main__":
    raise SystemExit(main())
