"""How long a simulation takes: 58 models on 32 H100s, 600 s of bursty groups, on one core.

Bursty groups (Prism, appendix A.1) at 8 requests a second; models of 2 to 15 billion parameters of
the catalogue. Then the same with half the requests, half the models, half the devices:
`growth.X` is the exponent of X in the wall time: 1 is linear. Each simulation is a process of its
own, pinned to one core; its wall time is that of the run, without imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Any

from ballast.bench.choose import workload_of
from ballast.bench.clusters import run_cluster
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.catalogue import catalogue
from ballast.sim.cluster import kinds_of
from benchmarks.common import finish, options

MODELS, DEVICES, SECONDS, RATE = 58, 32, 600.0, 8.0
SMALLEST, LARGEST = 2e9, 15e9
MOST_TOKENS = 2048
SLO = Slo(ttft=2.0, tpot=0.1)


def specs_of(n: int) -> list[ModelSpec]:
    """`n` models, the catalogue's over and over, each with weights of its own."""
    known = [m for m in catalogue().values() if SMALLEST < m.parameters < LARGEST]
    names = [f"{known[i % len(known)].name}.{i}" for i in range(n)]
    return [
        replace(
            known[i % len(known)].spec(max_model_len=8192, slo=SLO), name=name, fingerprint=name
        )
        for i, name in enumerate(names)
    ]


def one(models: int, devices: int, seconds: float, rate: float, preset: str) -> dict[str, Any]:
    """One simulation in this process."""
    specs = specs_of(models)
    names = [s.name for s in specs]
    work = workload_of("bursty", names, rate=rate, seconds=seconds, most_tokens=MOST_TOKENS, seed=1)
    began = time.perf_counter()
    ran = run_cluster(
        resolve(preset, placement="work"),
        kinds_of(f"{devices}xH100-80G"),
        specs,
        work,
        dict.fromkeys(names, SLO),
    )
    return {
        "wall_s": time.perf_counter() - began,
        "requests": len(work.requests),
        "answered": ran.report.total.answered,
        "output_tokens": ran.report.total.output_tokens,
        "jobs": ran.jobs,
        "attainment": ran.report.total.attainment,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def apart(**what: Any) -> dict[str, Any]:
    """The same in a process of its own, on one core."""
    command = [sys.executable, "-m", "benchmarks.sim_speed", "--one", json.dumps(what)]
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--preset", default="balloon")
        parser.add_argument("--one", help=argparse.SUPPRESS)

    if argv is None and "--one" in sys.argv:
        print(json.dumps(one(**json.loads(sys.argv[sys.argv.index("--one") + 1]))))
        return
    args = options(__doc__, argv, extra)
    seconds = SECONDS / (10 if args.quick else 1)
    base = {
        "models": MODELS,
        "devices": DEVICES,
        "seconds": seconds,
        "rate": RATE,
        "preset": args.preset,
    }
    full = apart(**base)
    half = {
        "requests": apart(**{**base, "seconds": seconds / 2}),
        "models": apart(**{**base, "models": MODELS // 2}),
        "devices": apart(**{**base, "devices": DEVICES // 2}),
    }
    result: dict[str, Any] = {
        f"wall_s_{MODELS}x{DEVICES}x{seconds:.0f}": full["wall_s"],
        "full": full,
        "growth": {what: log2(full["wall_s"] / ran["wall_s"]) for what, ran in half.items()},
        "half": half,
    }
    finish(args, "sim_speed", result)


if __name__ == "__main__":
    main()
