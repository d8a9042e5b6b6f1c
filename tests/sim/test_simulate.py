"""The engine's loop in virtual time: every preset answers everything, and the books add up."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ballast.core.cost import StepCosts, activation_bytes
from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings
from ballast.engine.state import DeviceState
from ballast.policy.presets import PRESETS
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import SimulatedRun, simulate
from tests.engine.fresh import check_views
from tests.policy import worlds

PAGE = worlds.PAGE
KEEP_PLACES = ("static", "recompute", "superinfer", "mirage", "kvswap", "muxserve")
"""Presets that refuse requests for which the places of the models have no room."""
COSTS = StepCosts(2e-3, 5e-5, 2e-4, 1e-7, 1e-9)


def spec(name: str, weight_pages: int = 20, **changes: object) -> ModelSpec:
    plain = worlds.spec(name, pages=weight_pages)
    return replace(plain, eos_token_ids=(0,), **changes)  # type: ignore[arg-type]


def submissions(models: list[str], n: int, seed: int, rate: float = 20.0) -> list[Submission]:
    rng = random.Random(seed)
    at, made = 0.0, []
    for i in range(n):
        at += rng.expovariate(rate)
        prompt = tuple(rng.randrange(1, 512) for _ in range(rng.randrange(1, 300)))
        model = rng.choices(models, [1 / (k + 1) for k in range(len(models))])[0]
        made.append(
            Submission(
                id=f"q{i}", model=model, prompt=prompt, max_tokens=rng.randrange(1, 80), arrival=at
            )
        )
    return made


def fleet(preset: str, specs: list[ModelSpec], pages: int, **device: object) -> FleetSettings:
    arena = max(activation_bytes(s, 128, 16) for s in specs)
    settings = DeviceSettings(
        budget_bytes=pages * PAGE + arena + PAGE, page_bytes=PAGE, step_tokens=128, step_logits=16
    )
    return FleetSettings(
        models=(),
        device=replace(settings, **device),  # type: ignore[arg-type]
        link=LinkSettings(bytes_per_second=1e8),
        preset=preset,
    )


class OutputLog:
    """Everything clients were told, checked as it comes."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, Output] = {}

    def __call__(self, now: float, output: Output) -> None:
        assert output.request_id not in self.ended, "something was said after the end"
        if isinstance(output, TokenOutput):
            assert output.index == self.tokens.get(output.request_id, 0)
            self.tokens[output.request_id] = output.index + 1
        else:
            self.ended[output.request_id] = output


def watch(now: float, state: DeviceState) -> None:
    """The invariants that must hold after every turn."""
    state.validate()
    check_views(state)
    for m in state.models.values():
        assert state.pool.ledger.owned(f"kv:{m.spec.name}") == m.kv.pages
        if m.kv.bounds.limit is not None:
            assert m.kv.pages <= m.kv.bounds.limit
    assert state.pool.free >= 0


def run(
    preset: str, pages: int = 90, n: int = 60, n_models: int = 4, seed: int = 0
) -> tuple[SimulatedRun, OutputLog, list[Submission]]:
    specs = [spec(f"m{i}", weight_pages=10 + 5 * i) for i in range(n_models)]
    arrivals = submissions([s.name for s in specs], n, seed)
    received = OutputLog()
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
    )
    result = simulate(
        fleet(preset, specs, pages), specs, arrivals, profile, received, observe=watch
    )
    return result, received, arrivals


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("pages", [90, 400])
def test_every_request_is_answered_completely_or_with_a_reason(preset: str, pages: int) -> None:
    result, received, arrivals = run(preset, pages)
    assert set(received.ended) == {s.id for s in arrivals}
    for s in arrivals:
        end = received.ended[s.id]
        if isinstance(end, FinishedOutput):
            assert (end.output_tokens, end.reason) == (s.max_tokens, "length")
            assert received.tokens[s.id] == s.max_tokens
        else:
            assert isinstance(end, FailedOutput)
            assert end.reason
    if preset not in KEEP_PLACES:
        assert all(isinstance(e, FinishedOutput) for e in received.ended.values())
    state = result.state
    assert not state.requests
    for m in state.models.values():
        m.kv.prefixes.drop(m.kv.pages)
        assert m.kv.pages == 0, "blocks leaked"


def family(parts: dict[str, str]) -> list[ModelSpec]:
    """Models made of segments `x1 y2 ...`: a letter as digest, and a size in units of 5 pages."""
    return [
        replace(
            spec(name),
            segment_bytes=tuple(5 * PAGE * int(size) for _, size in made.split()),
            segment_digests=tuple(letter * 64 for letter, _ in made.split()),
        )
        for name, made in parts.items()
    ]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("pages", [45, 300])
def test_models_that_share_segments_are_served_from_any_pool(preset: str, pages: int) -> None:
    parts = {"a": "e1 p3", "twin": "e1 p3", "b": "e1 q3", "c": "e1 r2 f1", "d": "s4", "dd": "s4"}
    specs = family(parts)
    arrivals = submissions([s.name for s in specs], 60, seed=5)
    received = OutputLog()
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
    )
    result = simulate(
        fleet(preset, specs, pages), specs, arrivals, profile, received, observe=watch
    )
    assert set(received.ended) == {s.id for s in arrivals}
    if preset not in KEEP_PLACES:
        assert all(isinstance(e, FinishedOutput) for e in received.ended.values())
    if pages == 300:
        distinct = {"e": 5, "p": 15, "q": 15, "r": 10, "f": 5, "s": 20}
        moved = sum(m.weights.own_pages * m.activations for m in result.state.models.values())
        if preset != "swap":
            assert moved == distinct["q"] + distinct["r"] + distinct["f"]
            assert sum(result.state.pool.ledger.owners().values()) >= sum(distinct.values())


def test_several_names_of_a_model_fit_where_copies_would_not() -> None:
    """Six names of a model of 20 pages, in a pool of 45: nothing is ever evicted."""
    specs = family({f"m{i}": "w4" for i in range(6)})
    arrivals = submissions([s.name for s in specs], 60, seed=2, rate=2.0)
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=0
    )
    received, entries = OutputLog(), list[dict[str, object]]()
    result = simulate(
        fleet("balloon", specs, 45), specs, arrivals, profile, received, entries.extend, watch
    )
    assert all(isinstance(e, FinishedOutput) for e in received.ended.values())
    assert sum(m.evictions for m in result.state.models.values()) == 0
    moved = [e["n_bytes"] for e in entries if e.get("event") == "TransferDone"]
    assert [n for n in moved if n] == [20 * PAGE]


def test_a_tight_pool_evicts_and_preempts_under_balloon() -> None:
    """By sizes alone: two requests that begin within 12 pages and need 16 in the end, and a second
    model that the pool cannot hold beside theirs."""
    specs = [spec("first"), spec("second")]
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
    )
    n, long = 300, 200
    assert 2 * specs[0].kv_bytes_per_token * n < 12 * PAGE
    assert 2 * specs[0].kv_bytes_per_token * (n + long) > 13 * PAGE
    arrivals = [
        Submission(id="older", model="first", prompt=(1,) * n, max_tokens=long),
        Submission(id="younger", model="first", prompt=(2,) * n, max_tokens=long),
        Submission(id="other", model="second", prompt=(3,) * n, max_tokens=1),
    ]
    received = OutputLog()
    result = simulate(
        fleet("balloon", specs, 32), specs, arrivals, profile, received, observe=watch
    )
    assert received.ended.keys() == received.tokens.keys() == {s.id for s in arrivals}
    assert all(isinstance(end, FinishedOutput) for end in received.ended.values())
    first, second = result.state.models.values()
    assert first.preemptions > 0
    assert first.evictions == 1
    assert (second.preemptions, second.evictions) == (0, 0)


def test_swap_keeps_one_model_on_the_device() -> None:
    specs = [spec(f"m{i}") for i in range(3)]
    profile = MachineProfile(costs={}, link=LinkRates.even(1e9), overhead=0.0)
    profile = replace(profile, costs={s.name: COSTS for s in specs})

    def one(now: float, state: DeviceState) -> None:
        backed = [m for m in state.models.values() if m.weights.backed]
        assert len(backed) <= 1

    arrivals = submissions([s.name for s in specs], 40, 3)
    received = OutputLog()
    simulate(fleet("swap", specs, 400), specs, arrivals, profile, received, observe=one)
    assert len(received.ended) == 40


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_run_is_the_same_to_the_last_entry(preset: str) -> None:
    stories = []
    for _ in range(2):
        entries: list[dict[str, object]] = []
        specs = [spec(f"m{i}") for i in range(3)]
        profile = MachineProfile(
            costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
        )
        simulate(
            fleet(preset, specs, 80),
            specs,
            submissions([s.name for s in specs], 40, 1),
            profile,
            OutputLog(),
            sink=entries.extend,
        )
        stories.append(entries)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 100


def test_a_request_that_can_never_fit_fails_at_once_and_says_why() -> None:
    specs = [spec("m", weight_pages=20)]
    received = OutputLog()
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    long = Submission(id="long", model="m", prompt=(1,) * 400, max_tokens=100)
    short = Submission(id="short", model="m", prompt=(1,) * 30, max_tokens=4)
    simulate(fleet("balloon", specs, 24), specs, [long, short], profile, received)
    end = received.ended["long"]
    assert isinstance(end, FailedOutput)
    assert end.code == "insufficient_memory"
    assert isinstance(received.ended["short"], FinishedOutput)


def test_prefixes_are_reused_between_requests() -> None:
    specs = [spec("m")]
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    prompt = tuple(range(1, 101))
    asked = [
        Submission(id=f"q{i}", model="m", prompt=prompt, max_tokens=4, arrival=float(i))
        for i in range(2)
    ]
    received = OutputLog()
    simulate(fleet("balloon", specs, 100), specs, asked, profile, received)
    cached = [received.ended[f"q{i}"].cached_tokens for i in range(2)]  # type: ignore[union-attr]
    assert cached == [0, 96]


def test_an_open_ended_request_gets_what_memory_can_hold() -> None:
    specs = [spec("m", weight_pages=20)]
    received = OutputLog()
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    chat = Submission(id="chat", model="m", prompt=(1,) * 30, max_tokens=482, open_ended=True)
    result = simulate(fleet("balloon", specs, 24), specs, [chat], profile, received)
    end = received.ended["chat"]
    assert isinstance(end, FinishedOutput)
    m = result.state.models["m"]
    tokens = 30 + end.output_tokens - 1
    pages = result.state.pool.total - result.state.arena.pages - m.weights.pages
    assert end.output_tokens < 482
    assert m.kv.layout.pages(-(-tokens // 16)) <= pages < m.kv.layout.pages(-(-tokens // 16) + 1)


def test_jobs_after_a_pause_or_a_prefill_take_longer_and_mapping_delays_activations() -> None:
    specs = [spec("m", weight_pages=20)]
    asked = [
        Submission(id=f"q{i}", model="m", prompt=(1,) * 30, max_tokens=4, arrival=float(i))
        for i in range(2)
    ]

    def outcome(**more: Any) -> list[float]:
        profile = MachineProfile(
            costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=1e-4, **more
        )
        times: list[float] = []
        simulate(
            fleet("balloon", specs, 100), specs, asked, profile, lambda at, o: times.append(at)
        )
        return times

    plain, cold, mapped = outcome(), outcome(wake=5e-4), outcome(page_seconds=1e-3)
    settling = outcome(settling=(5e-4, 2e-4))
    gaps = [[b - a for a, b in pairwise(times[5:9])] for times in (plain, cold, settling)]
    # Of the second request, whose model is there: the prefill waits for nothing but the lane.
    assert cold[5] - 1.0 == pytest.approx(plain[5] - 1.0 + 5e-4)
    assert gaps[1] == pytest.approx(gaps[0])
    assert settling[5] - 1.0 == pytest.approx(plain[5] - 1.0)
    assert gaps[2][:2] == pytest.approx([gaps[0][0] + 5e-4, gaps[0][1] + 2e-4])
    assert gaps[2][2:] == pytest.approx(gaps[0][2:])
    assert mapped[0] == pytest.approx(plain[0] + 20e-3)
    assert mapped[5:] == pytest.approx(plain[5:])
    assert outcome(answer=3e-4) == pytest.approx([at + 3e-4 for at in plain])


def test_jobs_after_another_models_and_beside_turns_take_longer() -> None:
    """While one model decodes, another's request comes in the middle of a step. The turn delays
    the prefill, the next job, once; the switches there and back slow the prefill and the step after
    it, the latter less: that model ran a moment ago. Nothing else is slower."""
    specs = [spec("a"), spec("b")]
    asked = [
        Submission(id="a", model="a", prompt=(1,) * 30, max_tokens=30, arrival=1.0),
        Submission(id="early", model="b", prompt=(1,) * 30, max_tokens=1, arrival=0.0),
    ]

    def outcome(came: float, **more: Any) -> dict[str, list[float]]:
        profile = MachineProfile(
            costs={"a": COSTS, "b": COSTS}, link=LinkRates.even(1e8), overhead=1e-4, **more
        )
        late = Submission(id="b", model="b", prompt=(1,) * 30, max_tokens=1, arrival=came)
        times: dict[str, list[float]] = {}
        simulate(
            fleet("balloon", specs, 100),
            specs,
            [*asked, late],
            profile,
            lambda at, o: times.setdefault(o.request_id, []).append(at),
        )
        return times

    steps = outcome(2.0)["a"]
    came = (steps[9] + steps[10]) / 2
    plain, turned = outcome(came), outcome(came, turn=3e-4)
    switched = outcome(came, switch=5e-4, switch_back=2e-4)
    assert plain["a"][10] < plain["b"][0] < plain["a"][11]
    for slower, first, then in ((turned, 3e-4, 3e-4), (switched, 5e-4, 7e-4)):
        assert slower["a"][:11] == pytest.approx(plain["a"][:11])
        assert slower["b"][0] == pytest.approx(plain["b"][0] + first)
        assert slower["a"][11:] == pytest.approx([at + then for at in plain["a"][11:]])


def test_a_device_of_several_ranks_is_refused() -> None:
    several = fleet("balloon", [spec("a")], 60, tensor_parallel=2)
    profile = MachineProfile(costs={"a": COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        simulate(several, [spec("a")], [], profile, print)


def test_no_pass_over_weights_in_host_memory_is_shorter_than_reading_them() -> None:
    specs = [spec("m", weight_pages=20)]
    arrivals = [Submission(id="r", model="m", prompt=tuple(range(8)), max_tokens=5, arrival=0.0)]
    for preset, seconds in (("recompute", 1e-3), ("c2cserve", sum(specs[0].segment_bytes) / 1e8)):
        costs = {"m": StepCosts(1e-3, 0.0, 0.0, 0.0, 0.0)}
        profile = MachineProfile(costs=costs, link=LinkRates.even(1e8), overhead=0.0)
        result = simulate(
            replace(
                fleet(preset, specs, 60), options={"promote": 0} if preset == "c2cserve" else {}
            ),
            specs,
            arrivals,
            profile,
            OutputLog(),
            observe=watch,
        )
        (m,) = result.state.models.values()
        assert m.weights.present_pages == (0 if preset == "c2cserve" else 20)
        assert m.lane_seconds == pytest.approx(5 * max(1e-3, seconds))


def test_a_first_token_says_how_long_its_model_was_activated() -> None:
    specs = [spec("a"), spec("b")]
    firsts: dict[str, TokenOutput] = {}
    costs = {s.name: COSTS for s in specs}
    profile = MachineProfile(costs=costs, link=LinkRates.even(1e8), overhead=1e-4)

    def heard(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput) and output.index == 0:
            firsts[output.request_id] = output

    arrivals = [
        Submission(id=f"{model}{n}", model=model, prompt=(1, 2, 3), max_tokens=2, arrival=at)
        for n, (model, at) in enumerate((("a", 0.0), ("a", 5.0), ("b", 6.0), ("b", 6.01)))
    ]
    simulate(fleet("swap", specs, 40), specs, arrivals, profile, heard)
    copy = 20 * PAGE / 1e8
    for name, seconds in (("a0", copy), ("a1", 0.0), ("b2", copy), ("b3", copy - 0.01)):
        queued, activating = firsts[name].queued, firsts[name].activating
        assert queued is not None
        assert activating == pytest.approx(seconds, rel=0.05, abs=1e-9), name
        assert 0.0 <= activating <= queued
