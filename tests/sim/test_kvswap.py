"""KV blocks swapped to the host, in virtual time: what it spares, what it costs; all adds up."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.clock import VirtualClock
from ballast.core.event import FinishedOutput
from ballast.core.link import LinkRates
from ballast.engine.story_file import StoryFile
from ballast.kv.blocks import KvCache
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from ballast.sim.event_heap import EventHeap
from ballast.sim.layer_passes import Alone, Pass
from ballast.sim.layer_stream import SimStreams
from ballast.sim.link import SimLink
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import SimulatedRun, simulate
from ballast.sim.story_reader import read_device_stories
from tests.policy import worlds
from tests.sim.test_simulate import COSTS, OutputLog, fleet, submissions, watch

LAYERS = 8
SPEC = replace(
    worlds.spec("a"), n_layers=LAYERS, segment_bytes=(worlds.PAGE,) * (LAYERS + 1), max_running=64
)
SPEC = replace(SPEC, block_tokens=worlds.PAGE // SPEC.kv_bytes_per_token)
ARRIVALS = submissions(["a"], 60, 1, rate=60.0)
PAGES = 80
FAST = LinkRates(1e11, 1e11, 5e10, 5e10)


def run(
    preset: str, rates: LinkRates = FAST, leaps: bool = True, sink: Any = None, **options: float
) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    entries: list[dict[str, Any]] = []
    received = OutputLog()
    profile = MachineProfile(costs={"a": COSTS}, link=rates, overhead=1e-4)
    settings = replace(fleet(preset, [SPEC], PAGES), options=options)
    result = simulate(
        settings, [SPEC], ARRIVALS, profile, received, sink or entries.extend, watch, leaps=leaps
    )
    for s in ARRIVALS:
        assert isinstance(received.ended[s.id], FinishedOutput)
        assert received.tokens[s.id] == s.max_tokens
    return result, entries


def stages(entries: list[dict[str, Any]]) -> list[int]:
    outcome = [e for e in entries if e.get("action") == "Stage"]
    assert not any("refused" in e for e in outcome)
    return [e["staged"] for e in outcome]


@pytest.mark.parametrize("pooled", [0, 1])
def test_on_a_fast_link_nobody_starts_again(pooled: int) -> None:
    swapped, entries = run("kvswap", pooled=pooled)
    without, _ = run("recompute", pooled=pooled)
    assert without.state.models["a"].preemptions > 0
    assert swapped.state.models["a"].preemptions == 0
    assert swapped.state.now < without.state.now
    assert max(stages(entries)) > 0
    assert not swapped.state.models["a"].kv.staged


def test_nothing_is_swapped_that_would_not_hide_unless_it_may() -> None:
    slow = LinkRates(1e7, 1e7, 4.3e6, 4.3e6)
    capped, entries = run("kvswap", slow)
    assert stages(entries) == []
    uncapped, _ = run("kvswap", slow, cap=0)
    assert uncapped.state.models["a"].preemptions < capped.state.models["a"].preemptions
    assert uncapped.state.now > capped.state.now


@pytest.mark.parametrize("options", [{}, {"cap": 0}, {"temporal": 1}])
def test_leaps_change_nothing(options: dict[str, float]) -> None:
    outcome = []
    for leaps in (True, False):
        result, entries = run("kvswap", leaps=leaps, **options)
        actions = [e for e in entries if "action" in e]
        m = result.state.models["a"]
        outcome.append((result.state.now, actions, m.lane_seconds, m.output_tokens))
    assert outcome[0] == outcome[1]


def test_a_model_whose_turn_is_over_gives_its_blocks_up(tmp_path: Path) -> None:
    """Its requests are paused and keep their KV, which goes to the host in a job of its own."""
    specs = [SPEC, replace(SPEC, name="b", fingerprint="b")]
    settings = replace(fleet("kvswap", specs, PAGES + 60), options={"cap": 0})
    settings = replace(settings, options={"cap": 0, "temporal": 1, "preemptive": 1, "quantum": 0.2})
    arrivals = submissions(["a", "b"], 60, 1, rate=60.0)
    profile = MachineProfile(costs={m.name: COSTS for m in specs}, link=FAST, overhead=1e-4)
    log, file = OutputLog(), StoryFile(tmp_path / "story", "device")
    simulate(settings, specs, arrivals, profile, log, file.write, watch)
    file.close()
    assert all(isinstance(end, FinishedOutput) for end in log.ended.values())
    (life,) = read_device_stories(tmp_path / "story")
    assert any(e.get("action") == "Stage" for e in life.entries)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


@given(
    st.integers(1, 40),
    st.sampled_from([1e6, 1e8, 1e10]),
)
def test_a_job_takes_what_the_arithmetic_of_the_policy_says(blocks: int, rate: float) -> None:
    """Alone on its link: `staged_seconds`, but for rounding."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    vm = NullVm(worlds.PAGE, 90)
    cache = KvCache(SPEC, Pool(vm, 90), vm, host_blocks=100)
    link = SimLink(heap, clock, LinkRates.even(rate))
    stream = SimStreams(heap, clock, link).make(SPEC)
    stream.add_staging(cache)
    table: list[int] = []
    assert cache.grow(table, blocks * SPEC.block_tokens) is None
    assert not stream.stops
    cache.staging.begin_moves(table, [])
    assert cache.staging.end_moves([table], done=True)
    stream.carry_blocks(cache.book.moves)
    pace = Alone(heap.agenda, 0.0, 0.1)
    Pass(LAYERS, [stream], pace).begin(0.0)
    while heap.agenda.next < inf:
        heap.agenda.run(heap.agenda.next)
    load, each = blocks * SPEC.block_bytes / LAYERS / rate, 0.1 / LAYERS
    whole = load + (LAYERS - 1) * max(load, each) + each
    assert pace.end == pytest.approx(whole, rel=1e-9)
    assert pace.stall == pytest.approx(whole - 0.1, rel=1e-6, abs=1e-12)
    cache.free(table)
    cache.validate([])


TWO = [replace(SPEC, name=name, fingerprint=name) for name in "ab"]


def test_kv_is_swapped_on_several_lanes() -> None:
    """Jobs on part of the compute wait for it, and longer than on all of it."""

    def served(rates: LinkRates) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        received = OutputLog()
        profile = MachineProfile(costs={m.name: COSTS for m in TWO}, link=rates, overhead=1e-4)
        several = replace(fleet("kvswap", TWO, 100, lanes=2, threads=2), options={"cap": 0})
        arrivals = submissions(["a", "b"], 40, 1, rate=60.0)
        simulate(several, TWO, arrivals, profile, received, entries.extend, watch)
        assert {type(received.ended[s.id]) for s in arrivals} == {FinishedOutput}
        return entries

    entries = served(FAST)
    assert {e["model"] for e in entries if e.get("action") == "Stage"} == {"a", "b"}
    jobs = [(e["lane"], e["parts"]) for e in entries if "lane" in e]
    assert {(0, 1), (1, 1)} <= set(jobs), "each with half of the compute"
    entries = served(LinkRates(1e8, 1e8, 5e7, 5e7))
    halves = {e["job"] for e in entries if e.get("parts") == 1 and "decode" in e}
    ends = (e for e in entries if e.get("event") == "JobDone" and e["job"] in halves)
    assert sum(e.get("stall", 0.0) > 0 for e in ends) > 10
