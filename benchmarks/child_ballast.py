"""Ballast as a contestant: one model on a roomy device, in process, prefix cache off.

Arguments: the checkpoint, its `linear`, and the device's `invariant` (1 or 0; by default its own).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast.bench.inprocess import InProcess
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import GiB, MiB
from benchmarks.child import Prompts, Run, serve


def load(
    path: Path, linear: str = "auto", invariant: str | None = None
) -> tuple[Run, Mapping[str, Any]]:
    files = (*path.glob("*.safetensors"), *path.glob("*.gguf"))
    size = sum(file.stat().st_size for file in files)
    budget = -(-(2 * size + GiB) // MiB) * MiB
    settings = FleetSettings(
        models=(ModelSettings(name="model", path=str(path), dtype="bfloat16", linear=linear),),
        device=DeviceSettings(
            budget_bytes=budget,
            prefix_cache=False,
            invariant=None if invariant is None else invariant == "1",
        ),
    )
    server = InProcess(settings)
    if server.device.failed:
        raise RuntimeError(server.device.failed["model"])
    server.device.populate()
    server.__enter__()
    number = itertools.count()

    def run(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        origin = time.perf_counter() - server.now
        submissions = [
            Submission(
                id=f"r{next(number)}",
                model="model",
                prompt=tuple(prompt),
                max_tokens=new_tokens,
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        answers = server.generate(submissions)
        for answer in answers.values():
            assert answer.finished.output_tokens == new_tokens
        return [[origin + t for t in answers[s.id].times] for s in submissions]

    path_class = type(server.device.executors["model"][0]).__name__
    weight_bytes = sum(server.device.models.by_name["model"].spec.segment_bytes)
    return run, {"path": path_class, "budget_bytes": budget, "weight_bytes": weight_bytes}


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1]), *sys.argv[2:]))
