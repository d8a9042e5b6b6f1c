"""What live comparisons share: models, the machine's profile, trace, service levels."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ballast.bench.demo_terms import LINK_RATIO, pace
from ballast.bench.device_run import DeviceRun, run_live, run_virtual
from ballast.bench.report import Report
from ballast.bench.run import specs_of
from ballast.bench.run_options import workload_of
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, Slo
from ballast.core.units import GiB, KiB
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS, Preset
from ballast.sim.calibrate import calibrate
from ballast.sim.machine_profile import MachineProfile
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/arena27_vtc_prism_0-300s.csv.gz"
PAGE = 256 * KiB
STEP_TOKENS = 128
PROMPT_FACTOR, OUTPUT_FACTOR = 0.5, 0.1
MOST_PROMPT, MOST_OUTPUT = 512, 96
FULL_REQUESTS = 8
"""Longest requests at once that peak KV, and so a fixed share without want, has room for."""
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
ROOMY = 2 * GiB


@dataclass(frozen=True)
class Setting:
    """Everything that does not depend on the preset."""

    roomy: FleetSettings
    """With memory for everything at once, and the paced link."""
    specs: list[ModelSpec]
    profile: MachineProfile
    workload: Workload

    @property
    def weight_bytes(self) -> int:
        return sum(s.weight_pages(PAGE) for s in self.specs) * PAGE

    @property
    def peak_kv_bytes(self) -> int:
        """KV of `FULL_REQUESTS` longest requests of every model."""
        tokens = FULL_REQUESTS * (MOST_PROMPT + MOST_OUTPUT)
        return sum(tokens * s.kv_bytes_per_token for s in self.specs)

    def under(self, preset: str, budget: int, link: float | None = None) -> FleetSettings:
        """The fleet with `budget` bytes of device memory, and the preset's options by default."""
        device = replace(self.roomy.device, budget_bytes=budget // PAGE * PAGE)
        chosen = replace(self.roomy, preset=preset, device=device, options={})
        if link is not None:
            chosen = replace(chosen, link=LinkSettings(bytes_per_second=link))
        return chosen

    def profiled(self) -> Setting:
        """The same, with a profile of the machine as it is now."""
        unpaced = replace(self.roomy, link=LinkSettings())
        return replace(self, profile=calibrate(unpaced))

    def with_levels(self, slos: Mapping[str, Slo]) -> Setting:
        """The same, the policies being told the service levels that requests are judged by."""
        models = tuple(replace(m, slo=slos[m.name]) for m in self.roomy.models)
        return replace(
            self,
            roomy=replace(self.roomy, models=models),
            specs=[replace(s, slo=slos[s.name]) for s in self.specs],
        )

    def virtual(
        self,
        fleet: FleetSettings,
        workload: Workload,
        slos: Mapping[str, Slo],
        preset: Preset | None = None,
    ) -> DeviceRun:
        assert fleet.link.pace is not None
        profile = self.profile.over(fleet.link.pace)
        return run_virtual(fleet, self.specs, workload, slos, profile, preset=preset)

    def live(self, fleet: FleetSettings, workload: Workload, slos: Mapping[str, Slo]) -> DeviceRun:
        return run_live(fleet, workload, slos, self.profile.lane_costs)


def trace_option(parser: argparse.ArgumentParser) -> None:
    """`--trace FILE`: the arrivals."""
    parser.add_argument("--trace", type=Path, default=TRACE, help="requests of many models")


def prepare(scratch: Path, trace: Path, seconds: float) -> Setting:
    """Make the models, measure the machine, pace the link, read the trace."""
    fleet = fleet_in(scratch / "fleet")
    profile = calibrate(fleet)
    specs = specs_of(fleet)
    link = pace(specs, profile.costs, LINK_RATIO)
    workload = arrivals(trace, [m.name for m in fleet.models], seconds)
    return Setting(
        replace(fleet, link=LinkSettings(bytes_per_second=link)), specs, profile, workload
    )


def fleet_in(folder: Path) -> FleetSettings:
    """The eight models, made where they are not there yet, with memory for all and no pace."""
    file = folder / "fleet.yaml"
    if not file.is_file():
        make_fleet(folder, steps=0, budget=ROOMY)
    device = DeviceSettings(
        budget_bytes=ROOMY, page_bytes=PAGE, step_tokens=STEP_TOKENS, step_logits=64
    )
    return replace(load_fleet(file, presets=PRESETS), device=device, options={})


def halves(fleet: FleetSettings) -> FleetSettings:
    """Two devices with half of the budget, and of the threads, that the only one of `fleet` has;
    each has a link of its own that is as fast."""
    whole = fleet.of_one_device("halves")
    pages = whole.budget_bytes // whole.page_bytes
    threads = whole.threads or len(os.sched_getaffinity(0))
    half = replace(whole, budget_bytes=pages // 2 * whole.page_bytes, threads=max(1, threads // 2))
    other = replace(half, name="cpu:1")
    link = replace(fleet.link, device=other.name)
    return replace(fleet, device=half, others=(other,), other_links=(link,))


def arrivals(trace: Path, names: list[str], seconds: float) -> Workload:
    """The trace's first `seconds` with models and lengths as here; bursts where there is none."""
    if not trace.is_file():
        most = MOST_PROMPT + MOST_OUTPUT
        return workload_of("bursty", names, rate=2.4, seconds=seconds, most_tokens=most)
    return (
        load_trace(trace)
        .map_models(names)
        .scale_lengths(PROMPT_FACTOR, OUTPUT_FACTOR, MOST_PROMPT, MOST_OUTPUT)
        .window(0.0, seconds)
    )


def service_levels(report: Report) -> dict[str, Slo]:
    """TTFT 5x and TPOT 2x the P95 of each model in `report`, a run with memory for everything."""

    def p95(values: list[tuple[str, float | None]], name: str) -> float:
        """Of one model; of all where it has no value in the window."""
        own = [v for model, v in values if v is not None and model == name]
        return float(np.percentile(own or [v for _, v in values if v is not None], 95))

    ttft = [(r.model, r.ttft) for r in report.records]
    tpot = [(r.model, r.tpot) for r in report.records]
    return {
        name: Slo(ttft=TTFT_SCALE * p95(ttft, name), tpot=TPOT_SCALE * p95(tpot, name))
        for name in report.models
    }


def no_levels(setting: Setting) -> dict[str, Slo]:
    """Service levels that everything meets: for runs that set them."""
    return {s.name: Slo(ttft=1e9, tpot=1e9) for s in setting.specs}
