"""Weights that kernels read in host memory (C2CServe): the tokens are those of weights on the GPU.

Three small Llamas. In float32 against `transformers`, with memory for one of them: hot segments
come onto pages and go, while passes read the others over the link. In bfloat16 on an invariant
device against the same one with all weights in its memory: with all of them on the host and the
share of HybridGEMM at 0, at a half and at 1, and with places that change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ballast.bench.inprocess import InProcess
from ballast.cluster.machine_choice import machine_of
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.live.machine import MakeMachine
from benchmarks.gpu_apart import Findings
from benchmarks.gpu_device import Gpu
from benchmarks.gpu_fleet import (
    DEVICE,
    Answers,
    compared,
    forget_gpu,
    make_models,
    requests_for,
    tight,
)

STEP = 512
"""Tokens of a pass: more than a tile of rows, or shares would make no difference."""
ON_HOST: dict[str, float] = {"promote": 0, "whole": 1, "knob": 0}
CASES: Mapping[str, dict[str, float]] = {
    "share 0": {**ON_HOST, "os_share": 0},
    "share 0.5": {**ON_HOST, "os_share": 0.5},
    "share 1": {**ON_HOST, "os_share": 1},
    "places change": {"promote": 1, "whole": 1},
}


def in_place(
    gpu: Gpu,
    found: Findings,
    device: DeviceSettings = DEVICE,
    make: MakeMachine = machine_of,
    hidden: int = 512,
    each: int = 4,
    tokens: int = 48,
) -> None:
    device = replace(device, step_tokens=STEP)
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as home:
            models = make_models(Path(home), dtype, hidden, "fused")
            requests = [_longer(r) for r in requests_for(models, each, tokens)]
            if dtype == "float32":
                fleet = tight(models, device, make, resident=1)
                fleet = replace(fleet, preset="c2cserve", options=CASES["places change"])
                rounds, result = _served(fleet, requests, make, rounds=2)
                result |= compared(models, requests, rounds, gpu.device)
                result["passed"] = not result["wrong"] and _read(result)
                found[dtype] = result
                continue
            steady = replace(device, invariant=True)
            fleet = tight(models, steady, make, resident=len(models))
            (expected,), _ = _served(fleet, requests, make)
            for name, options in CASES.items():
                case = replace(fleet, preset="c2cserve", options=options)
                (answers,), result = _served(case, requests, make)
                pairs = [(answers[id].tokens, a.tokens) for id, a in expected.items()]
                result["tokens"] = sum(len(theirs) for _, theirs in pairs)
                result["wrong"] = sum(
                    mine != theirs for a, b in pairs for mine, theirs in zip(a, b, strict=True)
                )
                result["passed"] = not result["wrong"] and _read(result)
                found[f"{dtype}, invariant, {name}"] = result
    if gpu.device.type == "cuda":
        forget_gpu()


def _longer(request: Submission) -> Submission:
    return replace(request, prompt=request.prompt * 3)


def _served(
    fleet: FleetSettings, requests: list[Submission], make: MakeMachine, rounds: int = 1
) -> tuple[list[Answers], dict[str, Any]]:
    """Answers of each round, and which layers lay where when a request ended."""
    most = least = 0
    with InProcess(fleet, make_machine=make) as server:
        state = server.device.state

        def look(now: float, output: object) -> None:
            nonlocal most, least
            plans = [m.weights.plan for m in state.models.values()]
            most = max(most, sum(len(plan.in_place) for plan in plans))
            least = max(least, sum(len(p.units) - len(p.in_place | p.absent) for p in plans))

        server.listen = look
        answers: list[Answers] = []
        for i in range(rounds):
            suffix = f"/{i}" if rounds > 1 else ""
            answers.append(server.generate([replace(r, id=f"{r.id}{suffix}") for r in requests]))
        server.drain()
        state.pool.validate()
    return answers, {"segments_on_host": most, "segments_on_pages": least}


def _read(result: Mapping[str, Any]) -> bool:
    """Whether passes have read host memory, or nothing has been shown."""
    return bool(result["segments_on_host"])
