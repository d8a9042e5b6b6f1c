"""KV swapped layer by layer, in virtual time: what it spares, what it costs; all adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Action, DropCache, Preempt, Reside
from ballast.core.clock import VirtualClock
from ballast.core.event import FinishedOutput, JobDoneEvent
from ballast.core.job import Job
from ballast.core.kv_swap import swapped_seconds
from ballast.core.link import LinkRates
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.view import ModelView, Shortage
from ballast.engine.apply import apply
from ballast.engine.state import DeviceState
from ballast.engine.story_file import StoryFile
from ballast.kv.blocks import KvCache
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from ballast.policy.memory.kvswap import KvSwap
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.event_heap import EventHeap
from ballast.sim.lanes import Running, SimLanes, guessed
from ballast.sim.layer_passes import Alone, Pass
from ballast.sim.layer_stream import SimStream, SimStreams
from ballast.sim.link import SimLink
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import Simulated, simulate
from ballast.sim.story_reader import read_device_stories
from tests.policy import worlds
from tests.sim.test_simulate import COSTS, OutputLog, fleet, submissions, watch

LAYERS = 8
SPEC = replace(
    worlds.spec("a"), n_layers=LAYERS, segment_bytes=(worlds.PAGE,) * (LAYERS + 1), max_running=64
)
ARRIVALS = submissions(["a"], 60, 1, rate=60.0)
FAST = LinkRates(1e11, 1e11, 5e10, 5e10)


def run(
    preset: str, rates: LinkRates = FAST, leaps: bool = True, sink: Any = None, **options: float
) -> tuple[Simulated, list[dict[str, Any]]]:
    entries: list[dict[str, Any]] = []
    received = OutputLog()
    profile = MachineProfile(costs={"a": COSTS}, link=rates, overhead=1e-4)
    settings = replace(fleet(preset, [SPEC], 110), options=options)
    result = simulate(
        settings, [SPEC], ARRIVALS, profile, received, sink or entries.extend, watch, leaps=leaps
    )
    for s in ARRIVALS:
        assert isinstance(received.ended[s.id], FinishedOutput)
        assert received.tokens[s.id] == s.max_tokens
    return result, entries


def swaps(entries: list[dict[str, Any]]) -> list[Rotation]:
    outcome = [e for e in entries if e.get("action") == "Reside"]
    assert not any("refused" in e for e in outcome)
    found = (e["plan"].get("kv", {"layers": (), "slots": 0}) for e in outcome)
    return [Rotation(tuple(kv["layers"]), kv["slots"]) for kv in found]


@pytest.mark.parametrize("pooled", [0, 1])
def test_on_a_fast_link_nobody_starts_again(pooled: int) -> None:
    swapped, entries = run("kvswap", pooled=pooled)
    without, _ = run("recompute", pooled=pooled)
    assert without.state.models["a"].preemptions > 0
    assert swapped.state.models["a"].preemptions == 0
    assert swapped.state.now < without.state.now
    rotations = swaps(entries)
    assert max(r.n_freed for r in rotations) > 0
    assert rotations[-1] == WHOLE, "at the end there is room"
    assert swapped.state.models["a"].kv.rotation == WHOLE


def test_nothing_is_swapped_that_would_not_hide_unless_it_may() -> None:
    slow = LinkRates(1e7, 1e7, 4.3e6, 4.3e6)
    capped, entries = run("kvswap", slow)
    assert swaps(entries) == []
    uncapped, _ = run("kvswap", slow, cap=0)
    assert uncapped.state.models["a"].preemptions < capped.state.models["a"].preemptions
    assert uncapped.state.now > 2 * capped.state.now
    frugal, _ = run("kvswap", slow, cap=0, dirty=1)
    assert frugal.state.now < uncapped.state.now


@pytest.mark.parametrize("options", [{}, {"cap": 0, "dirty": 1}, {"temporal": 1}])
def test_leaps_change_nothing(options: dict[str, float]) -> None:
    outcome = []
    for leaps in (True, False):
        result, entries = run("kvswap", leaps=leaps, **options)
        actions = [e for e in entries if "action" in e]
        m = result.state.models["a"]
        outcome.append((result.state.now, actions, m.lane_seconds, m.output_tokens))
    assert outcome[0] == outcome[1]


def test_stories_replay(tmp_path: Path) -> None:
    file = StoryFile(tmp_path / "story", "device")
    run("kvswap", sink=file.write)
    file.close()
    (life,) = read_device_stories(tmp_path / "story")
    assert any(e.get("action") == "Reside" for e in life.entries)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


@given(
    st.sets(st.integers(0, LAYERS - 1), min_size=2).flatmap(
        lambda layers: st.tuples(st.just(tuple(sorted(layers))), st.integers(1, len(layers) - 1))
    ),
    st.sampled_from([0, 30, 1000, 20000]),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([LinkRates.even(1e6), LinkRates(3e6, 1e6, 2e6, 5e5)]),
)
def test_a_job_takes_what_the_arithmetic_of_plans_says(
    plan: tuple[tuple[int, ...], int], read: int, written: int, dirty: bool, rates: LinkRates
) -> None:
    """Alone on its link: `core.swapping.swapped_seconds`, but for rounding."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    vm, token = NullVm(worlds.PAGE, 90), SPEC.kv_bytes_per_token // LAYERS
    cache = KvCache(SPEC, Pool(vm, 90), vm, layered=True)
    link = SimLink(heap, clock, rates)
    stream = SimStreams(heap, clock, link, dirty=dirty).make(SPEC)
    stream.add_kv(cache)
    rotation = Rotation(*plan)
    stored = written if dirty else read + written
    assert not stream.stops
    stream.turn_kv(rotation)
    pace = Alone(heap.agenda, 0.0, 0.1)
    Pass(LAYERS, [stream], pace).begin(0.0, read, written)
    while heap.agenda.next < inf:
        heap.agenda.run(heap.agenda.next)
    whole = swapped_seconds(LAYERS, rotation, 0.1, read * token, stored * token, rates)
    assert pace.end == pytest.approx(whole, rel=1e-9)
    assert pace.stall == pytest.approx(whole - 0.1, rel=1e-6, abs=1e-12)


TWO = [replace(SPEC, name=name, fingerprint=name) for name in "ab"]


def on_two_lanes(rates: LinkRates, **options: float) -> tuple[Simulated, list[dict[str, Any]]]:
    """Two models beside each other, of which each is short of memory."""
    entries: list[dict[str, Any]] = []
    received = OutputLog()
    profile = MachineProfile(costs={m.name: COSTS for m in TWO}, link=rates, overhead=1e-4)
    several = replace(fleet("kvswap", TWO, 140, lanes=2, threads=2), options=options)
    arrivals = submissions(["a", "b"], 40, 1, rate=60.0)
    result = simulate(several, TWO, arrivals, profile, received, entries.extend, watch)
    assert {type(received.ended[s.id]) for s in arrivals} == {FinishedOutput}
    assert all(received.tokens[s.id] == s.max_tokens for s in arrivals)
    result.state.validate()
    return result, entries


def test_kv_is_swapped_on_several_lanes() -> None:
    """Jobs on part of the compute wait for it, and longer than on all of it."""
    _, entries = on_two_lanes(FAST, cap=0)
    rotating = {e["model"] for e in entries if e.get("action") == "Reside"}
    assert rotating == {"a", "b"}
    jobs = [(e["lane"], e["parts"]) for e in entries if "lane" in e]
    assert {(0, 1), (1, 1)} <= set(jobs), "each with half of the compute"
    _, entries = on_two_lanes(LinkRates(1e8, 1e8, 5e7, 5e7), cap=0)
    halves = {e["job"] for e in entries if e.get("parts") == 1 and "decode" in e}
    ends = (e for e in entries if e.get("event") == "JobDone" and e["job"] in halves)
    stalls = [e.get("stall", 0.0) for e in ends]
    assert sum(stall > 0 for stall in stalls) > 10


def test_jobs_on_several_lanes_share_the_link() -> None:
    """Two that are alike, each on half of the compute, are as one on half of all there is."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    vm, token = NullVm(worlds.PAGE, 90), SPEC.kv_bytes_per_token // LAYERS
    link = SimLink(heap, clock, LinkRates.even(1e6))
    lanes = SimLanes(heap, clock, 0.0)
    rotation = Rotation((2, 4, 6), 2)
    for i, model in enumerate(TWO):
        stream = SimStreams(heap, clock, link).make(model)
        stream.add_kv(KvCache(model, Pool(vm, 90), vm, layered=True))
        stream.turn_kv(rotation)

        def way(pace: Running, stream: SimStream = stream) -> Pass:
            return Pass(LAYERS, [stream], pace)

        half = guessed(0.5, 0.1, 0.0, 1.0)
        lanes.start(0.0, Job(i, i, model.name, (), 1), half, (), (way, 1000, 30))
    done = heap.take(None)
    assert [type(event) for event in done] == [JobDoneEvent, JobDoneEvent]
    rates = LinkRates.even(5e5)
    whole = swapped_seconds(LAYERS, rotation, 0.2, 1000 * token, 1030 * token, rates)
    assert clock.now() == pytest.approx(whole)
    for event in done:
        assert isinstance(event, JobDoneEvent)
        assert event.seconds == pytest.approx(whole)
        assert event.stall == pytest.approx(whole - 0.2)


def test_kv_comes_home_while_a_part_of_what_kv_has_stays_free() -> None:
    """Weights take nine tenths of this device: a reserve counted in its pages could not be met."""
    rotating = Rotation((2, 5), 1)
    m = worlds.model("a", pages=900, kv=70)
    m = replace(m, spec=SPEC, kv_rotation=rotating, kv_layer_pages=10)
    view = worlds.device(m, free=26, total=1000)
    (change,) = KvSwap(reserve=0.1)(view, KvSwap()(view, None).memo).actions
    assert isinstance(change, Reside)
    assert change.plan.kv == WHOLE
    tight = worlds.device(m, free=15, total=1000)
    assert KvSwap(reserve=0.1)(tight, KvSwap()(tight, None).memo).actions == ()


def test_kv_comes_home_where_other_models_caches_fill_the_pool() -> None:
    """What others have cached counts as free, and goes as far as it is needed."""
    rotating = replace(
        worlds.model("a", pages=900, kv=70), spec=SPEC, kv_rotation=Rotation((2, 5), 1)
    )
    rotating = replace(rotating, kv_layer_pages=10)
    hoarder = replace(worlds.model("b", pages=10, kv=26, cached=26), kv_rotation=WHOLE)
    view = worlds.device(rotating, hoarder, free=2, total=1008)
    drop, change = KvSwap(reserve=0.1)(view, KvSwap()(view, None).memo).actions
    assert isinstance(drop, DropCache)
    assert (drop.model, drop.pages) == ("b", 8)
    assert isinstance(change, Reside)
    assert change.plan.kv == WHOLE
    scarce = worlds.device(rotating, replace(hoarder, cached_pages=16), free=2, total=1008)
    assert KvSwap(reserve=0.1)(scarce, KvSwap()(scarce, None).memo).actions == ()


def test_what_a_model_has_cached_itself_pays_for_its_layers_first() -> None:
    rotating = replace(
        worlds.model("a", pages=900, kv=70, cached=35), spec=SPEC, kv_rotation=Rotation((2, 5), 1)
    )
    rotating = replace(rotating, kv_layer_pages=10)
    other = replace(worlds.model("b", pages=10, kv=26, cached=26), kv_rotation=WHOLE)
    view = worlds.device(rotating, other, free=0, total=1006)
    drop, change = KvSwap(reserve=0.1)(view, KvSwap()(view, None).memo).actions
    assert isinstance(drop, DropCache)
    assert (drop.model, drop.pages) == ("a", 35)
    assert isinstance(change, Reside)
    assert (change.model, change.plan.kv) == ("a", WHOLE)


def test_blocks_are_moved_together_without_memory_behind_them() -> None:
    """In virtual time a move copies nothing: addresses here and on the host are numbers."""
    settings = replace(fleet("kvswap", [SPEC], 110), options={"pooled": 1})
    profile = MachineProfile(costs={"a": COSTS}, link=FAST, overhead=1e-4)
    device = SimDevice(
        settings.of_one_device("this test"),
        [SPEC],
        resolve("kvswap"),
        profile,
        lambda now, output: None,
    )
    m = device.state.models["a"]
    device.submit(ARRIVALS[0])
    device.finish(0.0)
    m.kv.clear()
    assert m.kv.turn(Rotation((0, 1, 2), 1))
    tables = [list[int]() for _ in range(6)]
    for table in tables:
        assert m.kv.grow(table, 3 * SPEC.block_tokens) is None
    for table in tables[::2]:
        m.kv.free(table)
    kept = tables[1::2]
    assert m.kv.compact(kept, 1000) > 0
    m.kv.validate(kept)
    for table in kept:
        m.kv.free(table)
    device.state.pool.validate()


@pytest.mark.parametrize("fair", [0, 1])
def test_layers_come_home_once_steps_are_longer_than_is_tolerated(fair: int) -> None:
    """Also while others are short of pages, as all steps of what runs are longer: the youngest
    request makes way, or that of the model with more than its share."""
    policy = KvSwap(fair_shares=fair)
    others = tuple(worlds.request(n, pages=10) for n in (5, 6))
    other = replace(worlds.model("b", kv=20, running=others), kv_rotation=WHOLE)
    short = Shortage("b", "r5", 4, limited=False)

    def comes_home(actions: Sequence[Action]) -> bool:
        changes = [a for a in actions if isinstance(a, Reside) and a.model == "a"]
        return any(not a.plan.kv.layers and "there is room" in a.why for a in changes)

    def rotating(tokens: int) -> ModelView:
        running = tuple(worlds.request(n, pages=15, tokens=tokens) for n in range(1, 5))
        m = worlds.model("a", kv=60, running=running)
        m = replace(m, spec=SPEC, decode_seconds=0.01, kv_layer_pages=10)
        return replace(m, kv_rotation=Rotation((2, 5), 1))

    def actions(tokens: int, policy: KvSwap) -> list[Action]:
        view = worlds.device(rotating(tokens), other, free=0, shortages=(short,))
        return list(policy(view, policy(view, None).memo).actions)

    def longer(tokens: int) -> float:
        """By which part steps are longer while layers rotate."""
        view = worlds.device(rotating(tokens), other, free=0, shortages=(short,))
        rates = LinkRates.even(view.link_bytes_per_second, 0.86 * view.link_bytes_per_second)
        each = SPEC.kv_bytes_per_token // LAYERS
        loaded, stored = 4 * tokens * each, 4 * (tokens + 1) * each
        return swapped_seconds(LAYERS, Rotation((2, 5), 1), 0.01, loaded, stored, rates) / 0.01 - 1

    hidden = [a for a in actions(100, policy) if isinstance(a, Reside) and a.model == "a"]
    assert all(len(a.plan.kv.layers) >= 2 for a in hidden)
    tokens = next(n for n in range(100, 5000, 10) if policy.slack < longer(n) < policy.tolerance)
    assert not comes_home(actions(tokens, policy))
    assert comes_home(actions(tokens, replace(policy, tolerance=policy.slack)))
    assert longer(5000) > policy.tolerance
    grown = actions(5000, policy)
    assert comes_home(grown)
    assert [a.request_id for a in grown if isinstance(a, Preempt)] == ["r4" if fair else "r6"]


@pytest.mark.parametrize("pages", [110, 120])
@pytest.mark.parametrize("rate", [60.0, 120.0])
def test_layers_do_not_come_home_for_requests_to_be_admitted_and_preempted(
    pages: int, rate: float
) -> None:
    """Two models in one pool on a link near its limit: swapping ended later than preempting alone,
    with up to six times as many preemptions."""
    link = LinkRates(2e9, 2e9, 0.86e9, 0.86e9)
    profile = MachineProfile(costs={m.name: COSTS for m in TWO}, link=link, overhead=1e-4)
    arrivals = submissions(["a", "b"], 60, 1, rate=rate)

    def served(preset: str, **options: float) -> tuple[float, int, int]:
        """The end in seconds, preemptions and changes of layers."""
        entries: list[dict[str, Any]] = []
        settings = replace(fleet(preset, TWO, pages), options=options)
        state = simulate(settings, TWO, arrivals, profile, OutputLog(), entries.extend, watch).state
        changes = sum(e.get("action") == "Reside" for e in entries)
        return state.now, sum(m.preemptions for m in state.models.values()), changes

    end, preempted, changes = served("kvswap")
    assert end < served("recompute")[0]
    _, preempted_hastily, changed_hastily = served("kvswap", tolerance=0.02)
    assert preempted < preempted_hastily / 2
    assert changes < changed_hastily / 3


def test_a_job_that_moves_kv_passes_no_layer() -> None:
    """Weights that return may still be loading at its end: evicting them has to wait for that."""
    settings = replace(fleet("kvswap", [SPEC], 110), options={"pooled": 1})
    slow = LinkRates.even(1e5)
    profile = MachineProfile(costs={"a": COSTS}, link=slow, overhead=1e-4)
    wanted = [
        {"rotation": Rotation((1, 3, 5), 1)},
        {"kv": Rotation((2, 4, 6), 1)},
        {"rotation": WHOLE, "kv": Rotation((2, 4, 6), 2)},  # the job that follows copies nothing
    ]
    loads = list[bool]()

    def act(now: float, state: DeviceState) -> None:
        m = state.models["a"]
        stream = m.weights.stream
        assert isinstance(stream, SimStream)
        loads.append(any(not c.buffer.written for c in stream._stream.in_flight))
        assert m.weights.may_be_loading or not loads[-1]
        turning = m.rotation != m.weights.slots.rotation or m.life.swap_to is not None
        if m.running and m.job is not None and wanted and not turning:
            plan = replace(m.plan, **wanted.pop(0))
            assert apply(state, Reside("a", plan), []) is None

    device = SimDevice(
        settings.of_one_device("this test"),
        [SPEC],
        resolve("kvswap", {"reserve": 1.0}),  # KV does not come home
        profile,
        lambda now, output: None,
        observe=act,
        leaps=False,
    )
    device.submit(ARRIVALS[0])
    device.finish(ARRIVALS[0].arrival)
    assert not wanted
    assert any(loads)
