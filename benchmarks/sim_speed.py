"""How long a simulation takes: 58 models on 32 H100s, 600 s of bursty groups, on one core.

Bursty groups (Prism, appendix A.1) at 8 requests a second; models of 2 to 15 billion parameters of
the catalogue. `lanes_wall_s`: the same on devices of four lanes. Then half the requests (half the
seconds), half the models, half the devices: `request_exponent` is the power of the number of
requests by which processor time grows, 1 is linear; `growth` the same of models and of devices.
`bytes_per_token`: by how much a run's memory grows, at its peak, over the tokens recorded. Each
simulation is a process of its own, pinned to one core; its wall time is that of the run, without
imports. Runs whose times are compared alternate, `ROUNDS` of each, and medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from ballast.bench.cluster_run import run_cluster
from ballast.bench.run_options import workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import catalogue
from benchmarks.common import MET, finish, options, verdict

MODELS, DEVICES, SECONDS, RATE = 58, 32, 600.0, 8.0
LANES = 4
ROUNDS = 3
SMALLEST, LARGEST = 2e9, 15e9
MOST_TOKENS = 2048
SLO = Slo(ttft=2.0, tpot=0.1)
AT_MOST = {
    "wall_s_58x32x600": 30.0,
    "lanes_wall_s": 60.0,
    "request_exponent": 1.1,
    "bytes_per_token": 200.0,
}
"""Goals, of the whole run: not of `--quick`."""


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


def one(
    models: int, devices: int, seconds: float, rate: float, preset: str, lanes: int = 1
) -> dict[str, Any]:
    """One simulation in this process."""
    specs = specs_of(models)
    names = [s.name for s in specs]
    work = workload_of("bursty", names, rate=rate, seconds=seconds, most_tokens=MOST_TOKENS, seed=1)
    kinds = parse_kinds(f"{devices}xH100-80G", lanes)
    before = memory_bytes("VmRSS")
    began, used = time.perf_counter(), time.process_time()
    ran = run_cluster(
        resolve(preset, placement="work"), kinds, specs, work, dict.fromkeys(names, SLO)
    )
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    tokens = sum(len(record.token_times) for record in ran.report.records)
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "requests": len(work.requests),
        "answered": ran.report.total.answered,
        "output_tokens": ran.report.total.output_tokens,
        "jobs": ran.jobs,
        "attainment": ran.report.total.attainment,
        "peak_mib": memory_bytes("VmHWM") / 2**20,
        "bytes_per_token": (memory_bytes("VmHWM") - before) / max(1, tokens),
    }


def memory_bytes(what: str) -> int:
    """`VmRSS`, this process's memory now, or `VmHWM`, the most that it has had."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


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
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def exponent(more: Sequence[dict[str, Any]], less: Sequence[dict[str, Any]], times: float) -> float:
    """The power of a quantity, of which the runs `more` have so many times as much, by which
    processor time grows; the median of runs in turn."""
    powers = [log(a["cpu_s"] / b["cpu_s"]) / log(times) for a, b in zip(more, less, strict=True)]
    return statistics.median(powers)


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
    full, fewer = [], []
    for _ in range(1 if args.quick else ROUNDS):
        full.append(apart(**base))
        fewer.append(apart(**{**base, "seconds": seconds / 2}))
    half = {
        "models": apart(**{**base, "models": MODELS // 2}),
        "devices": apart(**{**base, "devices": DEVICES // 2}),
    }
    lanes = apart(**base, lanes=LANES)
    wall = f"wall_s_{MODELS}x{DEVICES}x{seconds:.0f}"
    result: dict[str, Any] = {
        wall: statistics.median(run["wall_s"] for run in full),
        "lanes_wall_s": lanes["wall_s"],
        "request_exponent": exponent(full, fewer, full[0]["requests"] / fewer[0]["requests"]),
        "bytes_per_token": statistics.median(run["bytes_per_token"] for run in full),
    }
    if not args.quick:
        result["ok"] = all(verdict(result[key], at_most=AT_MOST[key]) == MET for key in AT_MOST)
    result |= {
        "growth": {what: exponent(full[:1], [run], 2.0) for what, run in half.items()},
        "full": full[0],
        "half": {"requests": fewer[0], **half},
        "lanes": lanes,
        "walls": [run["wall_s"] for run in full],
    }
    finish(args, "sim_speed", result)


if __name__ == "__main__":
    main()
