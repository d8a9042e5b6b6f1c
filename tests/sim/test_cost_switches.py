"""What a simulation counts beside jobs and copies: each once, each with a switch, leaps or not."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.errors import ConfigError
from ballast.core.event import Output
from ballast.core.job import JobLoad
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.kv.blocks import KvCache
from ballast.kv.layout import Layout
from ballast.memory.pool import Pool
from ballast.policy.presets import resolve
from ballast.sim.cost_switches import ALL, COSTS, CostSwitches, read_cost_switches
from ballast.sim.device import SimDevice
from ballast.sim.job_spread import PERIOD, JobFactors, JobSpread, lognormal, quantiles_of
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.page_costs import LoopTime, PageCosts, TimedVm
from ballast.sim.profile import device_profile
from ballast.sim.simulate import SimulatedRun, simulate
from ballast.sim.story_costs import TimedJob, fit_jobs, spread_of
from ballast.sim.topology import ClusterLinks, places
from tests.effort import some
from tests.sim.restless import register, restless_world
from tests.sim.test_enough_memory import world
from tests.sim.test_leap import books

JOB = StepCosts(8e-3, 4e-5, 1.1e-5, 3e-8, 1e-9, per_tile=1e-3)
PAGES = PageCosts(map=3e-4, unmap=2e-4, beside=1e-4)
NOISY = JobSpread(quantiles=lognormal(0.3), drift=0.1, seed=3)
LINK = LinkRates.even(1e8)
TimedOutputs = list[tuple[float, Output]]
World = tuple[FleetSettings, list[ModelSpec], list[Submission]]


def profile_for(specs: list[ModelSpec], **more: Any) -> MachineProfile:
    costs = {s.name: JOB for s in specs}
    known: dict[str, Any] = {"overhead": 3e-4, "wake": 7e-4, "answer": 1e-4, "page_seconds": 4e-4}
    known |= {"settling": (5e-4, 2e-4), "switch": 6e-4, "switch_back": 1e-4, "turn": 4e-4}
    return MachineProfile(costs=costs, link=LINK, **known | more)


def run(
    of: World, profile: MachineProfile, *, leaps: bool = True
) -> tuple[TimedOutputs, SimulatedRun]:
    fleet, specs, requests = of
    result: TimedOutputs = []

    def said(at: float, output: Output) -> None:
        result.append((at, output))

    done = simulate(fleet, specs, requests, profile, said, leaps=leaps)
    done.state.pool.validate()
    return result, done


@pytest.mark.parametrize("preset", ["static", "swap", "balloon", "balloon+round-robin", "mirage"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_leaps_change_nothing_whatever_counts(preset: str, ahead: int) -> None:
    seen: Counter[str] = Counter()
    seeds = some(range(4), 2)
    for seed in seeds:
        of = world(seed, preset, 1 + seed % 2)
        more = {"pages": PAGES, "copies_slow": 0.2, "spread": NOISY, "ahead": ahead}
        profile = profile_for(of[1], **more)
        (result, one), (leapt, done) = (run(of, profile, leaps=leaps) for leaps in (False, True))
        assert leapt == result, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        seen["steps"] += sum(e["steps"] for e in done.story.entries if e.get("event") == "Leap")
        again, _ = run(of, profile)
        assert again == result
        other = replace(profile, spread=replace(NOISY, seed=4))
        assert run(of, other)[0] != result
    assert seen["steps"] > 12 * len(seeds), seen


def test_leaps_change_nothing_where_layers_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    for seed in range(6):
        of = restless_world(seed, 1)
        profile = profile_for(of[1], pages=PAGES, copies_slow=0.2, spread=NOISY, ahead=seed % 2)
        (result, one), (leapt, done) = (run(of, profile, leaps=leaps) for leaps in (False, True))
        assert leapt == result, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"


def test_leaps_change_nothing_where_devices_share_a_link() -> None:
    def both(leaps: bool) -> list[TimedOutputs]:
        result: list[TimedOutputs] = [[], []]
        devices = []
        joints = ClusterLinks(per_host=2, host=LinkRates.even(1.2e8))
        for i, place in enumerate(places(joints, [(LINK, 1)] * 2)):
            fleet, specs, requests = world(10 + i, "swap", 1)
            device = SimDevice(
                replace(fleet.device, name=f"d{i}"),
                specs,
                resolve(fleet.preset, fleet.options),
                profile_for(specs, pages=PAGES, copies_slow=0.2, spread=NOISY),
                lambda at, output, i=i: result[i].append((at, output)),  # type: ignore[misc]
                leaps=leaps,
                world=place.host.world,
                route=place.route,
            )
            for request in requests:
                device.submit(request)
            device.drain(max(r.arrival for r in requests))
            devices.append(device)
        for device in devices:
            device.end()
        return result

    assert both(True) == both(False)


def test_with_every_cost_off_runs_are_what_they_were() -> None:
    changed: Counter[str] = Counter()
    for seed in range(6):
        of = world(seed, "balloon", 1)
        plain = profile_for(of[1])
        costly = replace(plain, pages=PAGES, copies_slow=0.2, spread=NOISY)
        off = CostSwitches(without=COSTS).of(costly)
        assert run(of, off)[0] == run(of, plain)[0]
        for cost in COSTS:
            others = tuple(c for c in COSTS if c != cost)
            kept = CostSwitches(without=others, drift=NOISY.drift, seed=NOISY.seed).of(costly)
            changed[cost] += run(of, kept)[0] != run(of, plain)[0]
    assert all(changed[cost] for cost in COSTS), changed


def test_an_activation_takes_its_calls_and_its_copy_once() -> None:
    (fleet, specs, requests) = world(1, "swap", 1)
    first = replace(requests[0], arrival=1.0)
    (spec,) = (s for s in specs if s.name == first.model)
    pages = weight_pages([spec], fleet.device.page_bytes)

    def answered(profile: MachineProfile) -> float:
        result, _ = run((fleet, [spec], [first]), profile)
        return result[0][0]

    plain = profile_for([spec], page_seconds=0.0)
    calls = PageCosts(map=2e-3, unmap=0.0, kv=False)
    took = answered(replace(plain, pages=calls)) - answered(plain)
    assert took == pytest.approx(pages * calls.map)
    beside = PageCosts(map=0.0, unmap=0.0, beside=2e-3, kv=False)
    took = answered(replace(plain, pages=beside)) - answered(plain)
    n_bytes = sum(spec.segment_bytes)
    assert took == pytest.approx(n_bytes / fleet.device.page_bytes * beside.beside)


def test_calls_follow_each_other_and_ranges_of_kv_may_be_free() -> None:
    clock = VirtualClock()
    loop = LoopTime(clock)
    vm = TimedVm(4096, 8, PageCosts(map=1.0, unmap=0.5, kv=False), loop)
    owners = {0: "weights:m", 1: "weights:m", 2: "kv:m"}
    vm.owner_of = owners.get
    weights, kv = vm.reserve(4 * 4096), vm.reserve(4 * 4096)
    clock.advance_to(10.0)
    vm.map(weights, 0, [0, 1])
    assert loop.until == 12.0
    vm.map(kv, 0, [2])
    vm.unmap(kv, 0, 1)
    assert loop.until == 12.0
    clock.advance_to(11.0)
    vm.unmap(weights, 0, 2)
    assert loop.until == 13.0
    clock.advance_to(20.0)
    vm.map(weights, 0, [0])
    assert loop.until == 21.0


def test_kv_takes_calls_only_where_blocks_are_larger_than_a_page() -> None:
    (spec, *_) = world(2, "static", 1)[1]
    for page, calls in ((4 * spec.block_bytes, 0), (spec.block_bytes // 2, 2)):
        loop = LoopTime(VirtualClock())
        vm = TimedVm(page, 64, PageCosts(map=1.0, unmap=1.0), loop)
        pool = Pool(vm, 64)
        kv, table = KvCache(spec, pool, vm), list[int]()
        vm.owner_of = pool.ledger.owner_of
        assert kv.grow(table, spec.block_tokens) is None
        kv.free(table)
        assert kv.pages == 0
        assert loop.until == 2 * calls


def test_an_engine_that_works_ahead_hides_calls_behind_the_job_before() -> None:
    """KV of one long answer in a range of its own, a page of it every few steps."""
    (fleet, specs, requests) = world(2, "static", 1)
    page = specs[0].block_bytes // 2
    of = (replace(fleet, device=replace(fleet.device, page_bytes=page)), specs, requests[:1])
    small = PageCosts(map=1e-3, unmap=0.0)

    def delay(ahead: int) -> float:
        plain = profile_for(specs, ahead=ahead)
        ends = [run(of, p)[1].seconds for p in (replace(plain, pages=small), plain)]
        return ends[0] - ends[1]

    assert all(Layout.of(s, page).slab_pages > 1 for s in specs)
    assert delay(0) > 0
    assert delay(1) < delay(0)


def test_factors_are_of_their_seed_device_model_and_moment() -> None:
    factors = JobFactors(JobSpread(quantiles=lognormal(0.2), seed=1), "d")
    values = [factors.at(0.01 * i, "m") for i in range(4000)]
    assert fmean(values) == pytest.approx(1.0, abs=0.02)
    assert pstdev(values) == pytest.approx(0.2, rel=0.1)
    before = fmean((a - 1) * (b - 1) for a, b in pairwise(values))
    assert abs(before) < 0.1 * pstdev(values) ** 2
    same = JobFactors(JobSpread(quantiles=lognormal(0.2), seed=1), "d")
    assert [same.at(0.01 * i, "m") for i in range(4000)] == values
    for other in (
        JobFactors(JobSpread(quantiles=lognormal(0.2), seed=2), "d"),
        JobFactors(JobSpread(quantiles=lognormal(0.2), seed=1), "e"),
    ):
        assert [other.at(0.01 * i, "m") for i in range(50)] != values[:50]
    assert [factors.at(0.01 * i, "n") for i in range(50)] != values[:50]


def test_drift_is_slow_and_within_its_share() -> None:
    factors = JobFactors(JobSpread(drift=0.1), "d")
    values = [factors.at(float(i), "m") for i in range(int(PERIOD))]
    assert max(values) == pytest.approx(1.105, abs=0.002)
    assert min(values) == pytest.approx(0.905, abs=0.002)
    assert max(abs(a - b) for a, b in pairwise(values)) < 0.003


def test_a_spread_is_found_again_in_jobs() -> None:
    rng = random.Random(5)
    load = JobLoad(0, 0, 0, 4, 400)
    jobs = [
        TimedJob("m", load, JOB.of(load) * rng.lognormvariate(0, 0.15), 1e-4, load)
        for _ in range(2000)
    ]
    found = spread_of(jobs, fit_jobs(jobs)).quantiles
    assert fmean(found) == pytest.approx(1.0)
    assert pstdev(found) == pytest.approx(0.15, rel=0.15)
    assert quantiles_of([2.0, 1.0], [1.0, 1.0])[0] == pytest.approx(2 / 3)


def test_a_profile_says_what_counts_and_options_say_what_does_not() -> None:
    kept = device_profile("H100-80G").of([])
    assert kept.pages is not None
    assert ALL.of(kept) == kept
    assert read_cost_switches("mapping, spread", None, 0.0).of(kept).pages is None
    wide = read_cost_switches(None, 0.2, 0.1, 7).of(kept).spread
    assert (len(wide.quantiles), wide.drift, wide.seed) == (32, 0.1, 7)
    with pytest.raises(ConfigError, match="mapping"):
        read_cost_switches("maping", None, 0.0)
    with pytest.raises(ConfigError, match="share"):
        read_cost_switches(None, -0.1, 0.0)
