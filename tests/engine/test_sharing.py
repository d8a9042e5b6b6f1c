"""Models with equal segments on one device: what the view says comes true, tokens stay right."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.clock import VirtualClock
from ballast.core.cost import activation_bytes
from ballast.core.event import Output, TokenOutput, TransferDoneEvent
from ballast.core.job import Job
from ballast.core.link import LinkRates
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.core.view import DeviceView, Residency
from ballast.engine.build import Hosted, build_state
from ballast.engine.events import handle
from ballast.engine.report import report
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.memory.vm_null import NullVm
from ballast.sim.event_heap import EventHeap
from ballast.sim.link import SimLink
from tests.engine.checkpoints import VOCAB, make_base_and_tuned
from tests.engine.orders import activate, evict
from tests.policy import worlds

PARTS = {"a": "ext", "b": "eyt", "twin": "ext", "own": "zw", "echo": "eey"}
PAGES = {"e": 6, "x": 5, "y": 3, "z": 4, "w": 2, "t": 1}


def make_state(pages: int) -> tuple[DeviceState, EventHeap]:
    specs = [
        replace(
            worlds.spec(name),
            segment_bytes=tuple(PAGES[p] * worlds.PAGE for p in parts),
            segment_digests=tuple(p * 64 for p in parts),
        )
        for name, parts in PARTS.items()
    ]
    arena = activation_bytes(specs[0], 16, 4)
    settings = DeviceSettings(
        budget_bytes=pages * worlds.PAGE + -(-arena // worlds.PAGE) * worlds.PAGE,
        page_bytes=worlds.PAGE,
        step_tokens=16,
        step_logits=4,
    )
    clock = VirtualClock()
    heap = EventHeap(clock)
    state = build_state(
        settings,
        [Hosted(s, [0] * len(s.segment_bytes)) for s in specs],
        NullVm(settings.page_bytes, settings.budget_bytes // settings.page_bytes),
        SimLink(heap, clock, LinkRates.even(1e7)),
        clock,
        lambda dst, src, n: None,
        {},
    )
    return state, heap


def validate(state: DeviceState, view: DeviceView) -> None:
    state.pool.validate()
    for m in state.models.values():
        m.weights.validate()
    result = report(state, "cpu")
    held = {owner: n for owner, n in result.owners.items() if n}
    assert held == state.pool.ledger.owners()
    assert sum(held.values()) == result.total - result.free - result.reclaiming
    leaving = (m for m in view.models if m.residency is Residency.EVICTING)
    going = {p for m in leaving for p in PARTS[m.name]}
    for name, m in state.models.items():
        if m.residency is not Residency.EVICTING:
            absent = m.weights.plan.absent
            going -= {p for i, p in enumerate(PARTS[name]) if i not in absent}
    assert view.coming == state.pool.free + sum(PAGES[p] for p in going)


@pytest.mark.parametrize("seed", range(4))
def test_the_view_says_what_activation_takes_and_eviction_frees(seed: int) -> None:
    rng = random.Random(seed)
    state, heap = make_state(14)
    kinds = set()
    for _ in range(1500):
        view = device_view(state)
        validate(state, view)
        kind = rng.choice(("activate", "evict", "evict", "part", "stop", "busy", "settle", "wait"))
        m = state.models["own" if kind == "part" else rng.choice(list(PARTS))]
        seen = view.model(m.spec.name)
        free = state.pool.free
        evicting = any(x.residency is Residency.EVICTING for x in view.models)
        if kind == "activate" and seen.residency is Residency.ABSENT:
            refused = activate(state, m.spec.name)
            if not evicting:
                fits = seen.missing_pages <= free
                assert (refused is None) == fits
                assert state.pool.free == free - (seen.missing_pages if fits else 0)
                kinds.add((kind, fits, seen.missing_pages == 0))
        elif kind == "evict" and not m.weights.plan.empty and m.residency is Residency.ABSENT:
            assert evict(state, m.spec.name) is None
            assert state.pool.free == free + seen.evictable_pages
        elif kind == "evict" and seen.residency is Residency.RESIDENT and m.job is None:
            assert evict(state, m.spec.name) is None
            if not evicting:
                assert state.pool.free == free + seen.evictable_pages
                kinds.add((kind, seen.evictable_pages > 0))
        elif kind == "part" and m.job is None and seen.present_pages:
            if seen.residency in (Residency.ABSENT, Residency.RESIDENT):
                pages = rng.choice((1, 1, seen.present_pages))
                assert evict(state, m.spec.name, pages) is None
                after = device_view(state).model(m.spec.name)
                assert state.pool.free - free >= pages
                if not m.weights.plan.empty:
                    assert state.pool.free - free == seen.present_pages - after.present_pages
                kinds.add((kind, after.present_pages > 0))
        elif kind == "stop" and seen.residency is Residency.ACTIVATING:
            m.for_requests = True  # all of which have left
            assert evict(state, m.spec.name) is None
            kinds.add((kind,))
        elif kind == "busy" and seen.residency is Residency.RESIDENT and m.job is None:
            m.life.begin_job(Job(0, 0, m.spec.name, ()), state.now)
            assert evict(state, m.spec.name) is None
        elif kind == "settle" and m.job is not None:
            m.life.end_job()
            state.evict(m)
        elif kind == "wait" and state.in_flight:
            for event in heap.take(None):
                handle(state, event)
    assert {kind for kind in kinds if kind[0] != "part"} == {
        ("activate", True, False),
        ("activate", True, True),
        ("activate", False, False),
        ("evict", True),
        ("evict", False),
        ("stop",),
    }


def test_a_part_frees_what_the_view_says_and_costs_as_much_to_bring_back() -> None:
    rng = random.Random(1)
    state, heap = make_state(22)
    kinds = set()
    for _ in range(300):
        view = device_view(state)
        validate(state, view)
        m = state.models[rng.choice(("own", "b", "echo"))]
        seen = view.model(m.spec.name)
        free = state.pool.free
        if seen.residency is Residency.ABSENT and rng.random() < 0.4:
            if activate(state, m.spec.name) is None:
                assert state.pool.free == free - seen.missing_pages
                kinds.add(("activate", seen.present_pages > 0))
            while state.in_flight:
                for event in heap.take(None):
                    handle(state, event)
        elif seen.present_pages:
            pages = rng.choice((1, seen.present_pages))
            assert evict(state, m.spec.name, pages) is None
            after = device_view(state).model(m.spec.name)
            assert state.pool.free - free >= pages
            assert state.pool.free - free == seen.present_pages - after.present_pages
            kinds.add(("part", after.present_pages > 0))
    assert kinds == {(kind, more) for kind in ("activate", "part") for more in (True, False)}


def test_a_model_that_counted_on_anothers_copy_makes_it_when_that_fails() -> None:
    state, heap = make_state(20)
    for name in ("a", "b", "twin"):
        assert activate(state, name) is None
    moved = []
    while state.in_flight:
        for event in heap.take(None):
            assert isinstance(event, TransferDoneEvent)
            if not moved:
                event = replace(event, error="the cable is loose")
            moved.append(event.n_bytes // worlds.PAGE)
            handle(state, event)
            validate(state, device_view(state))
    assert state.models["a"].residency is Residency.FAILED
    assert state.models["b"].residency is state.models["twin"].residency is Residency.RESIDENT
    first = PAGES["e"] + PAGES["x"] + PAGES["t"]
    assert moved == [first, PAGES["y"], 0, PAGES["e"] + PAGES["t"], PAGES["x"]]


def test_a_request_has_room_beside_a_pinned_model_that_shares() -> None:
    state, _ = make_state(30)
    models = {n: replace(m.spec, pinned=n == "a") for n, m in state.models.items()}
    for name, m in state.models.items():
        m.spec = models[name]
    rooms = {n: state.room(m) for n, m in state.models.items()}
    assert rooms == {"a": 18, "b": 15, "twin": 18, "own": 12, "echo": 15}


# -- on real models ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model under two names, and one that has its embeddings and head but other layers."""
    root = tmp_path_factory.mktemp("models")
    base, tuned = make_base_and_tuned(root)
    return {"base": base, "again": base, "tuned": tuned}


def fleet(paths: dict[str, Path], preset: str = "balloon") -> FleetSettings:
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=32, step_logits=8, threads=1
    )
    models = tuple(
        ModelSettings(name=n, path=str(p), dtype="float32") for n, p in sorted(paths.items())
    )
    return FleetSettings(models=models, device=device, preset=preset)


def asked(model: str, tokens: int = 30) -> Submission:
    prompt = tuple((11 * k + 5) % VOCAB for k in range(20))
    sampling = Sampling(temperature=0.0, seed=1)
    return Submission(
        id=model, model=model, prompt=prompt, max_tokens=tokens, sampling=sampling, ignore_eos=True
    )


def validate_live(server: InProcess) -> None:
    state = server.device.state
    result = server.device.snapshot().owners
    assert {o: n for o, n in result.items() if n} == state.pool.ledger.owners()
    state.pool.validate()
    for m in state.models.values():
        m.weights.validate()
        mapped = state.pool.ledger.owned(m.weights.owner) + state.pool.ledger.holders.held(
            m.weights.owner
        )
        assert m.weights.range.os_backed() == mapped


def test_hosts_and_devices_hold_equal_segments_once(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths)) as server:
        hosts = server.device.models.by_name
        assert hosts["again"].addresses == hosts["base"].addresses
        base, tuned = hosts["base"].addresses, hosts["tuned"].addresses
        assert [a == b for a, b in zip(base, tuned, strict=True)] == [True, False, False, True]
        assert hosts["again"].spec.fingerprint == hosts["base"].spec.fingerprint
        answers = server.generate([asked(n) for n in paths])
        assert answers["base"].tokens == answers["again"].tokens != answers["tuned"].tokens
        assert len(set(answers["base"].tokens)) > 8
        owners = server.device.state.pool.ledger.owners()
        assert "weights:base" not in owners
        assert "weights:again" not in owners
        sizes = [-(-n // (64 * KiB)) for n in hosts["base"].spec.segment_bytes]
        assert owners["weights:tuned"] == sum(sizes[1:3])
        assert sum(n for o, n in owners.items() if o.startswith("shared:")) == sum(sizes)
        validate_live(server)


def test_the_second_name_is_active_without_a_copy(paths: dict[str, Path]) -> None:
    with InProcess(fleet(paths)) as server:
        moved = []
        for name in ("base", "again", "tuned"):
            known = len(server.device.story.entries)
            server.generate([asked(name)])
            entries = list(server.device.story.entries)[known:]
            moved.append([e["n_bytes"] for e in entries if e.get("event") == "TransferDone"])
        specs = server.device.specs
        layers = sum(specs["tuned"].segment_bytes[1:3])
        assert moved == [[specs["base"].weight_bytes], [], [layers]]


@pytest.mark.parametrize("victim", ["again", "tuned"])
def test_tokens_stay_right_while_a_sharer_goes_and_comes(
    paths: dict[str, Path], victim: str
) -> None:
    """The other model has brought the segments, and leaves in the middle of an answer."""
    with InProcess(fleet(paths)) as server:
        alone = server.generate([asked("base", 60)])["base"].tokens
    with InProcess(fleet(paths)) as server:
        state = server.device.state
        gone: list[str | None] = []
        server.generate([asked(victim, 5)])

        def drop(now: float, output: Output) -> None:
            if (
                isinstance(output, TokenOutput)
                and output.request_id == "base"
                and output.index == 20
            ):
                gone.append(evict(state, victim))
                validate_live(server)

        server.listen = drop
        assert server.generate([asked("base", 60)])["base"].tokens == alone
        assert gone == [None]
        server.listen = None
        back = server.generate([replace(asked(victim, 60), id="back")])["back"].tokens
        assert (back == alone) == (victim == "again")
        validate_live(server)


@pytest.mark.parametrize("preset", ["balloon", "swap", "static"])
def test_a_pool_too_small_for_two_copies_serves_all_names(
    paths: dict[str, Path], preset: str
) -> None:
    settings = fleet(paths, preset)
    with InProcess(settings) as server:
        alone = {n: server.generate([asked(n)])[n].tokens for n in paths}
        state = server.device.state
        pages = state.arena.pages + sum(s.n_pages for s in state.shared) + 24
    device = replace(settings.device, budget_bytes=pages * 64 * KiB)
    two = tuple(m for m in settings.models if m.name != "tuned")
    with InProcess(replace(settings, device=device, models=two)) as server:
        answers = server.generate([asked(m.name) for m in two])
        assert {n: a.tokens for n, a in answers.items()} == {m.name: alone[m.name] for m in two}
        result = [e for e in server.device.story.entries if e.get("event") == "TransferDone"]
        assert sum(e["n_bytes"] for e in result) == server.device.specs["base"].weight_bytes
        validate_live(server)
