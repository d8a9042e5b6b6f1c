"""Leaps change nothing but the work it takes: answers, their times and the books are the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ballast.core.cost import StepCosts, activation_bytes
from ballast.core.entries import Sink
from ballast.core.event import Output
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.request import Submission
from ballast.core.rotation import WHOLE
from ballast.core.settings import FleetSettings
from ballast.core.units import GiB, ceil_div
from ballast.engine.state import DeviceState
from ballast.kv.layout import Layout
from ballast.sim.device import OnDeviceTurn
from ballast.sim.layer_stream import SimStream
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import SimulatedRun, simulate
from tests.effort import some
from tests.sim.restless import LENDING, lending_world, register, restless_world
from tests.sim.test_enough_memory import world

COSTS = StepCosts(8e-3, 4e-5, 1.1e-5, 3e-8, 1e-9, per_tile=1e-3)
SETTLING = (5e-4, 2e-4, 1e-4)
TimedOutputs = list[tuple[float, Output]]


def run(
    fleet: FleetSettings,
    specs: list[ModelSpec],
    requests: list[Submission],
    *,
    leaps: bool,
    sink: Sink | None = None,
    observe: OnDeviceTurn | None = None,
) -> tuple[TimedOutputs, SimulatedRun]:
    result: TimedOutputs = []
    costs = {s.name: COSTS for s in specs}
    profile = MachineProfile(
        costs=costs,
        link=LinkRates.even(1e8),
        overhead=3e-4,
        wake=7e-4,
        settling=SETTLING,
        switch=6e-4,
        switch_back=2e-4,
        turn=4e-4,
        answer=1e-4,
    )
    done = simulate(
        fleet,
        specs,
        requests,
        profile,
        lambda at, o: result.append((at, o)),
        sink,
        observe,
        leaps=leaps,
    )
    done.state.pool.validate()
    for m in done.state.models.values():
        m.weights.validate()
    return result, done


def books(done: SimulatedRun) -> dict[str, Any]:
    state = done.state
    return {
        "jobs": state.jobs,
        "seconds": done.seconds,
        "free": state.pool.free,
        "models": {
            name: (
                m.last_run,
                m.last_used,
                m.lane_seconds,
                m.activations,
                m.evictions,
                m.preemptions,
                m.output_tokens,
                m.cached_tokens,
                m.step_counts,
                m.step_tokens,
                m.kv.pages,
                m.kv.counts.cached_pages,
                m.kv.counts.cached_blocks,
                m.decode_seconds,
                m.prefill_seconds,
                m.weights.slots.rotation,
                None if m.weights.stream is None else m.weights.stream.loads,
            )
            for name, m in state.models.items()
        },
    }


RUNS = [
    *((preset, *where) for preset in ("static", "swap") for where in ((0, 1), (60, 1), (0, 2))),
    *(("balloon", *where) for where in ((0, 1), (60, 1), (0, 2))),
    ("balloon+round-robin", 0, 1),
    ("balloon+round-robin", 0, 2),
    ("balloon+round-robin", 0, 4),
    ("balloon", 30, 4),
    ("static", 60, 3),
    ("swap+deadline", 0, 3),
    *((preset, 0, lanes) for preset in ("recompute", "kvswap") for lanes in (1, 2)),
    ("swap+deadline", 60, 1),
    ("static+deadline", 60, 1),
]


@pytest.mark.parametrize(("preset", "first", "lanes"), RUNS)
def test_runs_with_and_without_leaps_are_the_same(preset: str, first: int, lanes: int) -> None:
    seen: Counter[str] = Counter()
    for seed in some(range(first, first + 10), 4):
        fleet, specs, requests = world(seed, preset, lanes)
        requests = [
            replace(
                r,
                max_tokens=r.max_tokens * (1 + seed % 4),
                arrival=r.arrival * (1 + 20 * (seed % 3)),
                stop_token_ids=tuple(range(40, 40 + seed % 2)),
            )
            for r in requests
        ]
        single, one = run(fleet, specs, requests, leaps=False)
        result, done = run(fleet, specs, requests, leaps=True)
        assert result == single, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        leaps = [e for e in done.story.entries if e.get("event") == "Leap"]
        seen["leaps"] += len(leaps)
        seen["steps"] += sum(e["steps"] for e in leaps)
        seen["jobs"] += done.state.jobs
        assert decisions(done) == decisions(one), f"seed {seed}"
    assert seen["steps"] > 0.3 / lanes * seen["jobs"], seen


@pytest.mark.parametrize("lanes", [1, 2])
def test_leaps_change_nothing_where_layers_rotate(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    seen: Counter[str] = Counter()
    seeds = some(range(15), 6)
    for seed in seeds:
        fleet, specs, requests = restless_world(seed, lanes)
        requests = [replace(r, max_tokens=r.max_tokens * (1 + seed % 4)) for r in requests]
        single, one = run(fleet, specs, requests, leaps=False)
        result, done = run(fleet, specs, requests, leaps=True)
        assert result == single, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        assert decisions(done) == decisions(one), f"seed {seed}"
        entries = done.story.entries
        seen["steps"] += sum(e["steps"] for e in entries if e.get("event") == "Leap")
        seen["remaps"] += sum(e.get("action") == "Remap" and "refused" not in e for e in entries)
        seen["jobs"] += done.state.jobs
        streams = [m.weights.stream for m in done.state.models.values() if m.weights.stream]
        seen["stalls"] += sum(stream.loads.stall_seconds > 0 for stream in streams)
        seen["loads"] += sum(stream.loads.n for stream in streams)
    assert seen["steps"] > 0.3 / lanes * seen["jobs"], seen
    assert seen["remaps"] > 4 * len(seeds), seen
    assert seen["stalls"] > len(seeds) / 2, seen
    assert seen["loads"] > seen["jobs"] / 2, seen


@pytest.mark.parametrize("lanes", [1, 2])
def test_weights_and_kv_of_a_model_stream_in_one_pass(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaps change nothing there either, and all adds up after every turn."""
    register(monkeypatch)
    seen: Counter[str] = Counter()

    def look(now: float, state: DeviceState) -> None:
        state.validate()
        for m in state.models.values():
            assert isinstance(m.weights.stream, SimStream)
            assert m.kv_staging in (None, m.weights.stream)
            loading = any(not c.buffer.written for c in m.weights.stream._stream.in_flight)
            assert m.weights.may_be_loading or not loading, "it would be evicted beneath a load"
            seen["both"] += m.job is not None and m.rotation != WHOLE and bool(m.kv.staged)

    for seed in range(4):
        fleet, specs, requests = restless_world(seed, lanes, kv=True)
        single, one = run(fleet, specs, requests, leaps=False, observe=look)
        result, done = run(fleet, specs, requests, leaps=True)
        assert result == single, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        assert decisions(done) == decisions(one), f"seed {seed}"
        for e in decisions(done):
            seen[e["action"]] += "refused" not in e
    assert min(seen["Remap"], seen["both"], 2 * seen["Stage"]) > 20, seen


def test_leaps_change_nothing_where_layers_lend_their_memory() -> None:
    seen: Counter[str] = Counter()
    for seed in LENDING:
        fleet, specs, requests = lending_world(seed)
        single, one = run(fleet, specs, requests, leaps=False)
        result, done = run(fleet, specs, requests, leaps=True)
        assert result == single, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        assert decisions(done) == decisions(one), f"seed {seed}"
        seen["remaps"] += sum(e["action"] == "Remap" for e in decisions(done))
        seen["leaps"] += sum(e.get("event") == "Leap" for e in done.story.entries)
    assert seen["remaps"] > 15, seen
    assert seen["leaps"] > 20, seen


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0"])
def test_layers_rotate_where_they_would_live(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    fleet, specs, requests = restless_world(2)
    room = fleet.device.budget_bytes + GiB  # what a GPU takes beside weights and KV
    fleet = replace(fleet, device=replace(fleet.device, name=device, budget_bytes=room))
    _, done = run(fleet, specs, requests, leaps=True)
    assert any(e["action"] == "Remap" and "refused" not in e for e in decisions(done))


def decisions(done: SimulatedRun) -> list[dict[str, Any]]:
    return [e for e in done.story.entries if "action" in e]


def test_a_request_that_finds_no_room_does_not_stop_the_others_from_leaping() -> None:
    fleet, (spec, *_), _ = world(1, "balloon")
    page, (prompt, output) = fleet.device.page_bytes, (120, 48)
    arena = ceil_div(activation_bytes(spec, 32, 8), page)
    two = 2 * Layout.of(spec, page).pages(ceil_div(prompt + output, spec.block_tokens))
    budget = (arena + weight_pages([spec], page) + two) * page
    fleet = replace(fleet, device=replace(fleet.device, budget_bytes=budget))
    requests = [
        Submission(
            id=f"r{i}", model=spec.name, prompt=(i,) * prompt, max_tokens=output, ignore_eos=True
        )
        for i in range(4)
    ]
    turns: Counter[bool] = Counter()
    for leaps in (False, True):

        def turned(now: float, state: DeviceState, leaps: bool = leaps) -> None:
            turns[leaps] += any(m.waiting for m in state.models.values())

        run(fleet, [spec], requests, leaps=leaps, observe=turned)
    assert turns[False] > output
    assert turns[True] < turns[False] - output / 2, turns


def test_leaps_go_on_where_cached_prefixes_make_room() -> None:
    """Memory is full of what answers have left behind; each block of a later one takes the place of
    some of that, which stops no leap."""
    fleet, (spec, *_), _ = world(4, "balloon")
    page, (prompt, output) = fleet.device.page_bytes, (60, 64)
    assert Layout.of(spec, page).blocks_per_slab == 1
    arena = ceil_div(activation_bytes(spec, 32, 8), page)
    one = Layout.of(spec, page).pages(ceil_div(prompt + output, spec.block_tokens))
    budget = (arena + weight_pages([spec], page) + one + one // 2) * page
    fleet = replace(fleet, device=replace(fleet.device, budget_bytes=budget))
    requests = [
        Submission(
            id=f"r{i}",
            model=spec.name,
            prompt=(i,) * prompt,
            max_tokens=output,
            arrival=float(10 * i),
            ignore_eos=True,
        )
        for i in range(8)
    ]
    turns: Counter[bool] = Counter()
    full: list[int] = []

    def turned(now: float, state: DeviceState) -> None:
        turns[leaps] += 1
        full.append(state.pool.free)

    for leaps in (False, True):
        result, done = run(fleet, [spec], requests, leaps=leaps, observe=turned)
        if not leaps:
            single, one_by_one = result, done
    assert result == single
    assert books(done) == books(one_by_one)
    assert min(full) < Layout.of(spec, page).slab_pages, "memory is full"
    prefills = ceil_div(prompt, fleet.device.step_tokens)
    assert turns[True] < len(requests) * (prefills + 3), turns
    assert turns[False] > len(requests) * output, turns
