"""`sim_fidelity`'s live runs, between profiles of the machine taken right before and after, and the
same runs in virtual time with these profiles.

All that was measured lies in files of a folder and is not measured again, so that an interrupted
benchmark goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.demo_terms import LINK_RATIO, pace
from ballast.bench.device_run import DeviceRun
from ballast.bench.machine_load import DISTURBED, OtherLoad
from ballast.bench.rate_search import bisect_max_rate
from ballast.bench.report import LatencyStats, Report
from ballast.bench.run import specs_of
from ballast.bench.servers import run_servers
from ballast.core.settings import FleetSettings, LinkSettings, Slo
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve
from ballast.sim.calibrate import calibrate
from ballast.sim.cluster import Kind
from ballast.sim.device import COUNTED
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.profile import device_profile, profile_of
from ballast.sim.toml_file import as_toml
from ballast.workload.workload import Workload
from benchmarks.common import NOT_STATED, verdict, write_json
from benchmarks.contenders import Comparison
from benchmarks.live_placement import placed_live
from benchmarks.setting import Setting, arrivals, fleet_in, halves
from benchmarks.worker_profile import calibrate_in_worker

BUDGET = 0.4
"""Of all weights and peak KV."""
LEVEL = Slo(ttft=0.5, tpot=0.05)
TARGET = 0.99
TRIES = 2
TRACE_SECONDS = 300.0
FIRST = "first"
"""The profile that rates and the link's pace are taken from."""
BENEATH = "in-process"
"""The profile that those of engines in worker processes have their link and pages from."""
AROUND = 3
"""Halvings of the interval between a rate and its double or half: a highest rate is known to 2 to
the power of 1/8, 9 %."""

MOVES = "prism"
"""The preset whose fleet policy moves models."""
OFTEN = {"every": 2.0, "threshold": 0.1}
"""Its options in a run of seconds."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A preset at a rate, as a factor on the trace's, on so many devices."""

    preset: str
    rate: float
    devices: int = 1

    def __str__(self) -> str:
        return f"{on(self.preset, self.devices)}@{self.rate:.2f}"


def on(preset: str, devices: int) -> str:
    """Name of a preset on so many devices."""
    return preset if devices == 1 else f"{preset}x{devices}"


def figures(report: Report) -> dict[str, float]:
    """What is compared, in seconds and tokens per second; over answered requests."""
    answered = [r for r in report.records if r.answered]
    ttft = LatencyStats.of(
        None if r.first_token is None else r.first_token - r.sent for r in answered
    )
    tpot = report.total.tpot
    assert ttft is not None
    assert tpot is not None
    return {
        "output_tokens_per_second": report.output_tokens_per_second,
        "ttft_p50": ttft.p50,
        "tpot_p50": tpot.p50,
        "ttft_p99": ttft.p99,
        "tpot_p99": tpot.p99,
    }


def attainment(ran: DeviceRun) -> float:
    """Of answered requests."""
    return ran.report.total.attained / ran.report.total.answered


def write_story(directory: Path, name: str, ran: DeviceRun) -> None:
    """Write what a device did to a file of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    file = StoryFile(path, "cpu:0")
    file.write(ran.story)
    file.close()


def capacity_errors(
    live: Mapping[str, float], virtual: Mapping[str, float], goal: float
) -> Document:
    """How far each highest rate in virtual time is from the live one, and whether the largest error
    meets the goal; a search that found no rate leaves nothing to compare."""
    errors = {name: virtual[name] / rate - 1 for name, rate in live.items() if rate}
    complete = bool(live) and len(errors) == len(live)
    largest = max(map(abs, errors.values())) if errors else None
    return {
        "capacity_error": errors,
        "capacity_error_max": largest,
        "capacity_error_goal": goal,
        "capacity": verdict(largest, at_most=goal) if complete else NOT_STATED,
    }


def summary(ran: DeviceRun) -> Document:
    """What is kept of a run."""
    total = ran.report.total
    return {
        "figures": figures(ran.report),
        "requests": total.requests,
        "answered": total.answered,
        "attainment_of_answered": attainment(ran),
        "send_late_p50": statistics.median(r.sent - r.at for r in ran.report.records),
        "send_late_max": ran.report.latest_send,
        **ran.counts,
    }


class Runs:
    """Measures what is missing in `folder`, and simulates.

    Two devices have half of the cores and of the budget each, and a link of their own; they are
    served by worker processes, without HTTP, and so they are profiled. Each is while the other is:
    they share the machine's memory, and the server and its client their cores.
    """

    def __init__(
        self, folder: Path, trace: Path, seconds: float, rounds: int, compared: Comparison
    ) -> None:
        """`seconds` of each live run; `rounds` of each calibration."""
        self.folder = folder
        self.seconds = seconds
        self.rounds = rounds
        self.compared = compared
        self.fleet = fleet_in(folder / "fleet")
        self.specs = specs_of(self.fleet)
        names = [m.name for m in self.fleet.models]
        self.trace = arrivals(trace, names, TRACE_SECONDS)
        self.levels = dict.fromkeys(names, LEVEL)

    @cached_property
    def link(self) -> float:
        """Bytes per second, the same for all runs."""
        return pace(self.specs, self.measured(FIRST).costs, LINK_RATIO)

    def rates(self, devices: int = 1) -> dict[str, float]:
        """By preset, the highest rate, by bisection in virtual time on the first profile."""
        file = self.folder / f"{on('rates', devices)}-{self.seconds:g}s.json"
        if not file.is_file():
            found = {p: self._max_rate(p, devices) for p in self.compared.rows}
            write_json(file, found)
        rates: dict[str, float] = json.loads(file.read_text())
        return rates

    def measured(self, name: str, devices: int = 1) -> MachineProfile:
        """The profile of that name, measured now if it was not; again where others disturbed."""
        name = on(name, devices)
        file = self.folder / f"profile-{name}.toml"
        if not file.is_file():
            fleet = halves(self.fleet) if devices > 1 else self.fleet
            for _ in range(TRIES):
                with OtherLoad(children=devices == 1) as others:
                    found = self._calibrated(fleet, name, devices)
                if others.cores < devices * DISTURBED:
                    break
            text = as_toml(profile_of("here", found, fleet.device))
            file.write_text(text, encoding="utf-8")
            write_json(self.folder / f"disturbed-{name}.json", {"others_cpu": others.cores})
        return device_profile(file).of(self.specs)

    def virtual(self, point: Point, profile: str) -> DeviceRun:
        """With the profile of that name, taken for as many devices."""
        setting = self._setting(profile, point.devices)
        fleet = self._fleet(setting, point)
        work = self._workload(point.rate)
        if point.devices == 1:
            return setting.virtual(fleet, work, self.levels)
        cluster = self._cluster(fleet, point, profile)
        counts = {what: cluster.total(what) for what in COUNTED}
        return DeviceRun(cluster.report, [], {"jobs": cluster.jobs, **counts})

    def live(self, point: Point, turn: int) -> Document:
        """What came of that run. The machine is profiled before a preset's runs of a turn."""
        result = self.recorded(point, turn)
        if result is None:
            before, _ = self.around(point.preset, turn)
            self.measured(before, point.devices)
            with OtherLoad(children=point.devices == 1) as others:
                ran = self._live(point, before)
            result = {**summary(ran), "others_cpu": others.cores}
            write_json(self._file(point, turn), result)
            if ran.story:
                write_story(self.folder / "stories", f"{point}-{turn}", ran)
        return result

    def around(self, preset: str, turn: int) -> tuple[str, str]:
        """Names of the profiles before and after a preset's live runs of a turn. Presets come in
        order, in every other turn in reverse; one's after is the next one's before."""
        presets = list(self.compared.rows)
        place = (presets if turn % 2 == 0 else presets[::-1]).index(preset)
        return f"turn-{turn}-{place}", f"turn-{turn}-{place + 1}"

    def simulated(self, point: Point, turn: int) -> dict[str, float]:
        """What is compared of the simulation of that live run: means over both profiles."""
        found = [figures(self.virtual(point, p).report) for p in self.around(point.preset, turn)]
        return {key: statistics.fmean(f[key] for f in found) for key in found[0]}

    def recorded(self, point: Point, turn: int) -> Document | None:
        """The same if it has run."""
        file = self._file(point, turn)
        result: Document | None = json.loads(file.read_text()) if file.is_file() else None
        return result

    def capacity(self, preset: str, devices: int) -> Document:
        """The highest rate live, and in virtual time with the profiles taken before and after: one
        preset's after is the next one's before.

        Both searches go the same ways: from what the first profile says.
        """
        file = self.folder / f"capacity-{on(preset, devices)}-{self.seconds:g}s.json"
        found: Document = json.loads(file.read_text()) if file.is_file() else {}
        if "live" in found:
            return found
        tried: list[tuple[float, float]] = [(r, a) for r, a in found.get("tried", [])]
        before = list(self.compared.rows).index(preset)
        profiles = [f"capacity-{i}" for i in (before, before + 1)]
        guess = self.rates(devices)[preset]

        def live(rate: float) -> float:
            known = dict(tried).get(rate)
            if known is None:
                ran = self._live(Point(preset, rate, devices), profiles[0])
                known = attainment(ran)
                tried.append((rate, known))
                write_json(file, {"tried": tried})
            return known

        self.measured(profiles[0], devices)
        search = around(guess, live)
        self.measured(profiles[1], devices)
        virtual = [
            around(guess, partial(self._attained, preset, devices, profile)) for profile in profiles
        ]
        found = {"live": search, "virtual": virtual, "tried": tried}
        write_json(file, found)
        return found

    def decisions(self, devices: int, rate: float) -> Document:
        """What the fleet policy that moves models decides live and in virtual time, on the same
        arrivals, and how alike that is (`alike`)."""
        file = self.folder / f"decisions-{devices}-{self.seconds:g}s.json"
        if file.is_file():
            found: Document = json.loads(file.read_text())
            return found
        point = Point(MOVES, rate, devices)
        before = self.around(MOVES, 0)[0]
        self.measured(before, devices)
        fleet, work = self._fleet(self._setting(before, devices), point), self._workload(rate)
        fleet = replace(fleet, options={**fleet.options, **OFTEN})
        served = asyncio.run(run_servers([fleet], work, self.levels, name="decisions"))
        live = [_decision(move) for move in served.moves]
        virtual = [_decision(move) for move in self._cluster(fleet, point, before).moves]
        found = {"live": live, "virtual": virtual, "alike": alike(live, virtual)}
        write_json(file, found)
        return found

    def disturbed(self) -> dict[str, float]:
        """Cores that others took while the machine was profiled."""
        files = self.folder.glob("disturbed-*.json")
        return {f.stem: json.loads(f.read_text())["others_cpu"] for f in sorted(files)}

    def _calibrated(self, fleet: FleetSettings, name: str, devices: int) -> MachineProfile:
        """Of one device as `ballast profile` does it. Of two in worker processes once: what their
        link and pages cost; each time: the engine behind their server."""
        beneath = on(BENEATH, devices)
        if devices == 1 or name == beneath:
            return calibrated_at_once(fleet, self.rounds, devices)
        return calibrate_in_worker(fleet, self.specs, self.measured(BENEATH, devices), self.rounds)

    def _setting(self, profile: str, devices: int) -> Setting:
        roomy = replace(self.fleet, link=LinkSettings(bytes_per_second=self.link))
        return Setting(roomy, self.specs, self.measured(profile, devices), self.trace)

    def _fleet(self, setting: Setting, point: Point) -> FleetSettings:
        budget = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes))
        fleet = setting.under(point.preset, budget)
        fleet = replace(fleet, options=self.compared.options(point.preset))
        return fleet if point.devices == 1 else halves(fleet)

    def _cluster(self, fleet: FleetSettings, point: Point, profile: str) -> ClusterRun:
        """Run a point on as many virtual devices, which begin as the server of `fleet`."""
        setting = self._setting(profile, point.devices)
        assert fleet.link.pace is not None
        paced = setting.profile.over(fleet.link.pace)
        preset = resolve(point.preset, fleet.options)
        return run_cluster(
            preset,
            [Kind(point.devices, profile_of("cpu", paced, fleet.device))],
            self.specs,
            self._workload(point.rate),
            self.levels,
            files=placed_live(preset, [fleet]),
        )

    def _workload(self, rate: float) -> Workload:
        """The trace at `rate`, over and over where it is too short for a run's seconds."""
        length = self.seconds * rate
        times = ceil(length / TRACE_SECONDS)
        return repeated(self.trace, TRACE_SECONDS, times).window(0.0, length).scale_rate(rate)

    def _max_rate(self, preset: str, devices: int) -> float:
        run = partial(self._attained, preset, devices, FIRST)
        return bisect_max_rate(run, TARGET, lo=3.0, hi=6.0, steps=AROUND, widen=3).rate

    def _attained(self, preset: str, devices: int, profile: str, rate: float) -> float:
        """In virtual time."""
        return attainment(self.virtual(Point(preset, rate, devices), profile))

    def _live(self, point: Point, profile: str) -> DeviceRun:
        setting = self._setting(profile, point.devices)
        fleet = self._fleet(setting, point)
        work = self._workload(point.rate)
        if point.devices == 1:
            return setting.live(fleet, work, self.levels)
        served = asyncio.run(run_servers([fleet], work, self.levels, name=str(point)))
        models = [m for device in served.devices for m in device.models]
        counts = {what: sum(getattr(m, what) for m in models) for what in COUNTED}
        return DeviceRun(served.report, [], counts)

    def _file(self, point: Point, turn: int) -> Path:
        return self.folder / f"live-{point}-{self.seconds:g}s-{turn}.json"


def _decision(move: Mapping[str, Any]) -> str:
    """Name a decision of a fleet policy, without its reason; devices by number."""
    device = str(move.get("device", "")).rpartition(":")[2]
    done = "refused" if "refused" in move else "done"
    return " ".join((str(move["action"]), str(move.get("model", "")), device, done))


def alike(one: Sequence[str], other: Sequence[str]) -> float | None:
    """Return the part of two sequences that is in both in the same order, from 0 to 1; None: both
    are empty."""
    if not one and not other:
        return None
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def around(guess: float, run: Callable[[float], float]) -> float:
    """The highest rate at which `run(rate)` attains the target, known to 9 %; 0: none was found
    down to a sixteenth of the guess."""
    return bisect_max_rate(run, TARGET, lo=guess / 2, hi=guess, steps=AROUND, widen=3).rate


def repeated(trace: Workload, seconds: float, times: int) -> Workload:
    """The trace so many times in a row, begun anew every `seconds`."""
    step = 1 + max((r.id for r in trace.requests), default=0)
    requests = [
        replace(r, id=r.id + i * step, at=r.at + i * seconds)
        for i in range(times)
        for r in trace.requests
    ]
    return Workload.of(trace.name, requests, trace.source, (*trace.labels, f"{times} times"))


def calibrated_at_once(fleet: FleetSettings, rounds: int, devices: int) -> MachineProfile:
    """The profile of one of `devices` that are all measured at the same time, each in a process of
    its own; of a single one in this process."""
    one = replace(fleet, others=(), other_links=())
    if devices == 1:
        return calibrate(one, rounds)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(devices, mp_context=spawn) as pool:
        return next(iter(pool.map(calibrate, [one] * devices, [rounds] * devices)))
