"""Choose the terms on which `ballast demo` compares presets: budget, link, bursts, service levels.

All of them follow from measurements of this machine, so that machines of different speed run the
same comparison; decision 034 explains the constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ballast.bench.device_run import run_virtual
from ballast.bench.expected_load import expected_of, expecting, request_tokens
from ballast.bench.report import Report
from ballast.bench.run_options import slos_of, workload_of
from ballast.core.cost import StepCosts
from ballast.core.errors import ConfigError
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec, weight_bytes
from ballast.core.settings import FleetSettings, ModelSettings, Slo
from ballast.core.units import ceil_div, format_bytes
from ballast.engine.sizing import set_aside
from ballast.sim.machine_profile import MachineProfile
from ballast.workload.bursty import BurstyGroups
from ballast.workload.workload import Workload

BUDGET_SHARE = 0.63
"""Device memory beside activations, over the weights of all models: not all of them fit at once.
There `static` is at its best: between the sizes at which one more model just has a place, and the
KV shares of all are too small for their requests."""
LOAD = 0.35
"""Arriving work over time, if every request were served alone: memory is the bound also on a
machine that is half as fast live as it was measured."""
LINK_RATIO = 9.4
"""Seconds to copy a model over seconds of its decode step of one sequence, as on a GH200 (4000 GB/s
of memory, 427 GB/s of link). Unpaced, a CPU copies from its own memory."""
TTFT_SCALE = 6.0
"""Level over the seconds to copy a model and to compute a mean prompt, on average of the models."""
TPOT_SCALE = 20.0
"""Level over a decode step of one sequence, on average of the models: what is compared is who has
memory, and steps wait for other models' prompts under every preset."""
SPARE_WORKER = False
"""No worker is killed in a demo, and to prepare a spare one would disturb what is measured."""
MOST_TOKENS = 256
"""Longest prompt and output together."""
MEAN_TOKENS = MOST_TOKENS // 8
"""Mean tokens of prompts, and of outputs."""
GROUPS = BurstyGroups(head=0.0, alpha=0.0, spell_seconds=80, pause_seconds=500)
"""No model is preferred: all but one come and go, with clumps of the same mean size; spells for
eight models as docs/workloads.md has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTerms:
    """Terms that are the same for every preset."""

    budget_bytes: int
    weight_bytes: int
    """Bytes of the weights of all models."""
    link_bytes_per_second: float
    slo: Slo
    """Service level of every model."""
    workload: Workload

    def describe(self) -> str:
        """The terms in one line."""
        n, seconds = len(self.workload.requests), self.workload.seconds
        share = self.budget_bytes / self.weight_bytes
        return (
            f"{n} requests in {seconds:.0f} s; {format_bytes(self.budget_bytes)} of memory, "
            f"{share:.0%} of what all weights take; first token within {self.slo.ttft:.2g} s, "
            f"each further one within {self.slo.tpot:.2g} s on average; weights arrive at "
            f"{format_bytes(round(self.link_bytes_per_second))}/s"
        )

    def of(self, fleet: FleetSettings, preset: str) -> FleetSettings:
        """The fleet on these terms, under `preset`."""
        link = self.link_bytes_per_second
        fleet = replace(
            fleet,
            preset=preset,
            options={},
            device=replace(fleet.device, budget_bytes=self.budget_bytes),
            link=replace(fleet.link, bytes_per_second=link, mixed_bytes_per_second=None),
            models=tuple(replace(m, slo=self.slo) for m in fleet.models),
            server=replace(fleet.server, spare_worker=SPARE_WORKER),
        )
        return expecting(fleet, self.workload)

    def write(self, fleet_file: Path, to: Path) -> None:
        """Write `fleet_file`, which has one device, with these terms and no preset of its own.

        Both files belong into one directory: paths of models are relative to it.
        """
        document: dict[str, Any] = yaml.safe_load(fleet_file.read_text(encoding="utf-8"))
        for key in ("preset", "options"):
            document.pop(key, None)
        document["devices"][0]["budget"] = self.budget_bytes
        document["links"] = [{"bandwidth": self.link_bytes_per_second}]
        document["defaults"] = document.get("defaults", {}) | {
            "slo": {"ttft": self.slo.ttft, "tpot": self.slo.tpot}
        }
        asked = request_tokens(self.workload)
        for model in document["models"]:
            model.pop("slo", None)
            stated = ModelSettings(name=model["name"], path="")
            model |= expected_of(stated, [model["name"]], asked)
        document["server"] = document.get("server", {}) | {"spare_worker": SPARE_WORKER}
        text = "# Written by `ballast demo` on terms measured on this machine.\n"
        text += yaml.safe_dump(document, sort_keys=False)
        to.write_text(text, encoding="utf-8")


def choose_terms(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    profile: MachineProfile,
    seconds: float,
    seed: int = 0,
    least: int = 0,
) -> DemoTerms:
    """Choose terms for the machine of `profile`; the workload lasts `seconds`. Where fewer than
    `least` requests would come, they are made shorter, down to a quarter of their length.

    Raises ConfigError where the fleet has several devices, or adapters.
    """
    if fleet.others or any(m.adapters for m in fleet.models):
        raise ConfigError("fleet", fleet.device.name, "the demo takes one device and no adapters")
    page = fleet.device.page_bytes
    whole = weight_bytes(specs)
    largest = max(
        s.weight_pages(page) * page + 2 * MOST_TOKENS * s.kv_bytes_per_token for s in specs
    )
    beside = max(int(BUDGET_SHARE * whole), largest)
    budget = ceil_div(set_aside(specs, fleet.device) + beside, page) * page
    link = float(round(pace(specs, profile.lane_costs)))
    names = [s.name for s in specs]
    for most in (MOST_TOKENS, MOST_TOKENS // 2, MOST_TOKENS // 4):
        sample = bursts(names, 2.0, seconds, seed, most)
        rate = LOAD / seconds_alone(sample, profile.lane_costs)
        workload = bursts(names, rate, seconds, seed, most)
        if len(workload.requests) >= least:
            break
    return DemoTerms(
        budget_bytes=budget,
        weight_bytes=whole,
        link_bytes_per_second=link,
        slo=levels(specs, profile.lane_costs, link),
        workload=workload,
    )


def bursts(
    names: Sequence[str], rate: float, seconds: float, seed: int, most: int = MOST_TOKENS
) -> Workload:
    """Requests of bursty groups, `rate` a second on average."""
    return workload_of(
        "bursty",
        names,
        rate=rate,
        seconds=seconds,
        most_tokens=most,
        seed=seed,
        groups=GROUPS,
    )


def step_seconds(costs: StepCosts) -> float:
    """A decode step of one sequence amid a mean request: where jobs were measured, and not at an
    empty context, which measurements extrapolate to."""
    return costs.of(JobLoad(0, 0, 0, 1, MEAN_TOKENS + MEAN_TOKENS // 2))


def pace(
    specs: Sequence[ModelSpec], costs: Mapping[str, StepCosts], ratio: float = LINK_RATIO
) -> float:
    """Bytes per second at which copying a model takes as long as `ratio` of its decode steps."""
    steps = sum(step_seconds(costs[s.name]) for s in specs)
    return sum(s.weight_bytes for s in specs) / (ratio * steps)


def seconds_alone(workload: Workload, costs: Mapping[str, StepCosts]) -> float:
    """Mean seconds of compute of a request that shares no step with others."""

    def alone(model: str, prompt: int, output: int) -> float:
        step = step_seconds(costs[model])
        return costs[model].prefill_seconds(prompt) + (output - 1) * step

    every = [alone(r.model, r.prompt_tokens, r.output_tokens) for r in workload.requests]
    return sum(every) / len(every)


def levels(specs: Sequence[ModelSpec], costs: Mapping[str, StepCosts], link: float) -> Slo:
    """Service levels, rounded to two digits; `link` in bytes per second."""
    first = [s.weight_bytes / link + costs[s.name].prefill_seconds(MEAN_TOKENS) for s in specs]
    step = [step_seconds(costs[s.name]) for s in specs]

    def scaled(scale: float, values: list[float]) -> float:
        return float(f"{scale * sum(values) / len(values):.2g}")

    return Slo(ttft=scaled(TTFT_SCALE, first), tpot=scaled(TPOT_SCALE, step))


def simulated(
    fleet: FleetSettings, specs: Sequence[ModelSpec], profile: MachineProfile, workload: Workload
) -> Report:
    """The fleet in virtual time on the machine of `profile`, its link paced as the fleet's."""
    slos = slos_of(fleet)
    assert fleet.link.pace is not None
    sized = [replace(s, slo=slos[s.name]) for s in specs]
    return run_virtual(fleet, sized, workload, slos, profile.over(fleet.link.pace)).report
