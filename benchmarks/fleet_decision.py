"""How long the controller takes to decide between devices: 58 models on 32 devices.

The setting of `sim_speed` (H100s, bursty groups, 8 requests a second; 120 s, `--quick`: 20 s), in
virtual time. A decision is what the controller does at each look of the fleet policy, in the
server as in the simulator: the view of all devices, and the policy's answer. Devices' reports are
not part of it: live they have come before, in virtual time they are made as they are read. Policies
that look at an interval look once a second. Processor time of one thread.

- `decision_ms`: by preset, with its own fleet policy, in ms: median, 99th percentile, and `n`.
- `median_max`: the greatest median (goal 1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from ballast.bench.cluster_run import run_cluster
from ballast.bench.run_options import workload_of
from ballast.control.orders import Orders
from ballast.core.report import DeviceReport
from ballast.policy.presets import Preset, resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.fleet_device import SimFleetDevice
from benchmarks.common import finish, options
from benchmarks.sim_speed import DEVICES, MODELS, MOST_TOKENS, RATE, SLO, specs_of

PLACEMENTS: Mapping[str, str | None] = {
    "prism": None,
    "ballast": None,
    "swiftcache": None,
    "balloon": "both",
}
"""Presets, and their fleet policies if not their own."""
EVERY = 1.0
"""Seconds between two looks of a policy with such an option."""


def preset_of(name: str) -> Preset:
    """Return a preset whose fleet policy looks often."""
    placement = PLACEMENTS[name]
    has_interval = "every" in resolve(name, placement=placement).fleet.options
    return resolve(name, {"every": EVERY} if has_interval else {}, placement=placement)


@contextmanager
def timed() -> Iterator[list[float]]:
    """Return a list that gets the seconds of processor time of each decision meanwhile."""
    seconds: list[float] = []
    reports = 0.0
    decide, report = Orders._decide, SimFleetDevice.last_report

    def measured(self: Orders) -> None:
        nonlocal reports
        began, reports = time.thread_time(), 0.0
        decide(self)
        seconds.append(time.thread_time() - began - reports)

    def reported(self: SimFleetDevice) -> DeviceReport:
        nonlocal reports
        began = time.thread_time()
        found = report(self)
        reports += time.thread_time() - began
        return found

    with (
        patch.object(Orders, "_decide", measured),
        patch.object(SimFleetDevice, "last_report", reported),
    ):
        yield seconds


def decisions(
    name: str, models: int, devices: int, seconds: float, rate: float = RATE
) -> list[float]:
    """Simulate a fleet; return the seconds of processor time of each decision."""
    specs = specs_of(models)
    names = [s.name for s in specs]
    work = workload_of("bursty", names, rate=rate, seconds=seconds, most_tokens=MOST_TOKENS, seed=1)
    kinds = parse_kinds(f"{devices}xH100-80G")
    with timed() as found:
        run_cluster(preset_of(name), kinds, specs, work, dict.fromkeys(names, SLO))
    return found


def summary(seconds: Sequence[float]) -> dict[str, float]:
    ms = 1e3 * np.array(seconds)
    return {"median": float(np.median(ms)), "p99": float(np.quantile(ms, 0.99)), "n": len(ms)}


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    seconds = 20.0 if args.quick else 120.0
    found = {name: summary(decisions(name, MODELS, DEVICES, seconds)) for name in PLACEMENTS}
    result: dict[str, Any] = {
        "models": MODELS,
        "devices": DEVICES,
        "decision_ms": found,
        "median_max": max(of["median"] for of in found.values()),
    }
    finish(args, "fleet_decision", result)


if __name__ == "__main__":
    main()
