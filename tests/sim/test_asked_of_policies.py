"""What a device asks of its memory policy beside decisions: what it answers is done, and where it
has no answer, what all policies share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from ballast.core.actions import (
    Action,
    Change,
    Decision,
    DropCache,
    GiveBack,
    Hold,
    Lend,
    Recall,
)
from ballast.core.cost import activation_bytes
from ballast.core.event import FailedOutput
from ballast.core.lease import (
    Lease,
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerMetEvent,
)
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView
from ballast.memory.vm_null import NullVm
from ballast.policy.base import MemoryPolicy
from ballast.policy.memory.balloon import Balloon
from ballast.policy.memory.defaults import ACTIVATIONS_GROW, LendAnswer
from ballast.policy.memory.static import FixedShares
from ballast.policy.presets import PRESETS, resolve
from tests.policy import worlds
from tests.sim.test_shortages import PEER, World, asked
from tests.sim.test_simulate import COSTS, PAGE, spec

WIDE = spec("wide", 5, hidden=1024, intermediate=4096)


def decided(world: World, by: str | None = None) -> list[str]:
    """Actions of the story that policies asked for (`by`: on whose account), the refused ones
    too."""
    entries = world.device.story.entries
    return [e["action"] for e in entries if "action" in e and e.get("by") == by]


def meet(world: World) -> list[LendingMessage]:
    """Let the device know another one; what it is sent from then on."""
    sent: list[LendingMessage] = []
    world.state.lending.send = sent.append
    world.state.lending.exports[PEER, 1] = NullVm(PAGE, 100).export(())
    world.device._heap.schedule(0.0, PeerMetEvent(PEER, 1, 100))
    return sent


def end(world: World, now: float) -> None:
    world.device.finish(now)
    world.state.validate()


# -- activations of a model that joins ------------------------------------------------------------


class Miser(Balloon):
    """Nothing makes way for activations."""

    def grow_activations(self, view: DeviceView, pages: int) -> Sequence[Action]:
        return ()


def cached_up_to_the_brim(memory: MemoryPolicy | None) -> World:
    """A device whose free pages hold no wide model's activations, but its caches do."""
    long = {"max_model_len": 2048}
    specs = [spec("a", 10, **long), spec("b", 10, **long)]
    world = World(specs, 20 + 60 + wider_by([*specs, WIDE]), memory=memory)
    world.device.submit(asked("a", "a", 900, 2))
    world.device.submit(asked("b", "b", 900, 2, at=0.01))
    world.device.advance(5.0)
    assert len(world.ends) == 2
    return world


def wider_by(specs: Sequence[ModelSpec]) -> int:
    """Pages of activations that the last of the models takes more than the others."""
    *others, last = (ceil_div(activation_bytes(s, 128, 16), PAGE) for s in specs)
    return last - max(others)


def test_caches_make_way_for_larger_activations_in_the_fleets_order() -> None:
    world = cached_up_to_the_brim(None)
    state = world.state
    grown = wider_by([state.models["a"].spec, WIDE])
    caches = {name: m.kv.counts.cached_pages for name, m in state.models.items()}
    arena = state.arena.pages
    lacking = 4
    state.pool.allocate("test", state.pool.free - grown + lacking)
    assert world.device.join(6.0, WIDE, COSTS) is None
    assert state.arena.pages == arena + grown
    left = {name: m.kv.counts.cached_pages for name, m in state.models.items() if name != "wide"}
    assert sum(caches.values()) - sum(left.values()) == lacking
    assert left["b"] == caches["b"], "those of the first model sufficed"
    assert decided(world)[-1] == "DropCache"


def test_a_policy_may_refuse_to_make_way_for_larger_activations() -> None:
    world = cached_up_to_the_brim(Miser())
    state = world.state
    state.pool.allocate("test", state.pool.free)
    caches = {name: m.kv.counts.cached_pages for name, m in state.models.items()}
    refused = world.device.join(6.0, WIDE, COSTS)
    assert refused is not None
    assert "pages of activations more than are set aside" in refused
    assert {name: m.kv.counts.cached_pages for name, m in state.models.items()} == caches


def test_no_more_is_dropped_for_activations_than_they_lack() -> None:
    a, b = worlds.model("a", kv=9, cached=4), worlds.model("b", kv=9, cached=9)
    for name in PRESETS:
        policy = resolve(name).memory
        assert list(policy.grow_activations(worlds.device(a, b, free=0), 3)) == [
            DropCache("a", 3, ACTIVATIONS_GROW)
        ]
        assert list(policy.grow_activations(worlds.device(a, b, free=0), 6)) == [
            DropCache("a", 6, ACTIVATIONS_GROW),
            DropCache("b", 2, ACTIVATIONS_GROW),
        ]


# -- lending, and giving back ---------------------------------------------------------------------


@dataclass(frozen=True)
class Lender(Balloon):
    """Lends what caches hold, but no more than `most` pages."""

    most: float = 100

    def lend(self, view: DeviceView, to: str, pages: int) -> LendAnswer:
        if pages > self.most:
            return LendAnswer(refusal=f"{to} gets no more than {self.most:.0f} pages")
        missing = pages - view.free
        caches = [DropCache(m.name, missing, "lent") for m in view.models if m.cached_pages]
        return LendAnswer(caches if missing > 0 else ())


@pytest.mark.parametrize("memory", [None, Lender(), Lender(most=3)])
def test_what_makes_way_for_a_loan_and_what_is_refused(memory: Lender | None) -> None:
    world = World([spec("a", 10, max_model_len=2048)], 60, memory=memory)
    sent = meet(world)
    world.device.submit(asked("a", "a", 900, 2))
    world.device.advance(5.0)
    free, cached = world.state.pool.free, world.state.models["a"].kv.counts.cached_pages
    assert cached > 5
    refused = world.device._operate(5.0, Lend(PEER, free + 5))
    lent = sum(len(word.lease.pages) for word in sent if isinstance(word, PagesLentEvent))
    if memory is None:
        assert refused == "short of 5 pages"
    elif memory.most < free:
        assert refused == f"{PEER} gets no more than 3 pages"
    else:
        assert (refused, lent) == (None, free + 5)
        assert world.state.models["a"].kv.counts.cached_pages == cached - 5
        assert world.device._operate(5.1, Recall(PEER, None, 30.0)) is None
        (word,) = (word for word in sent if isinstance(word, PagesRecalledEvent))
        world.device._heap.schedule(5.2, PagesReturnedEvent(word.lease))
    if refused is not None:
        assert (lent, world.state.pool.free) == (0, free)
        assert world.state.models["a"].kv.counts.cached_pages == cached
    end(world, 6.0)


class Tidy(Balloon):
    """Gives back what is unused, all but one page, once no request is open."""

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = Balloon.__call__(self, view, memo)
        idle = not any(m.waiting or m.running for m in view.models)
        actions = [GiveBack(to, n - 1, "it is idle") for to, n in view.lenders if idle and n > 1]
        none = GiveBack("nobody", 1)
        return replace(decision, actions=(*decision.actions, *actions, none))


@pytest.mark.parametrize("memory", [None, Tidy()])
def test_a_borrower_gives_back_what_its_policy_does_not_need(memory: MemoryPolicy | None) -> None:
    world = World([spec("a", 10)], 60, memory=memory)
    sent = meet(world)
    lease = Lease(0, 1, PEER, world.state.settings.name, tuple(range(12)))
    world.device._heap.schedule(0.01, PagesLentEvent(lease))
    world.device.submit(asked("a", "a", 100, 2, at=0.1))
    end(world, 1.0)
    returned = [page for w in sent if isinstance(w, PagesReturnedEvent) for page in w.lease.pages]
    assert len(returned) == (0 if memory is None else 11)
    assert set(returned) <= set(lease.pages)
    assert world.state.lending.borrower.unused == 12 - len(returned)
    assert ("GiveBack" in decided(world)) == (memory is not None)


# -- borrowed pages that are asked back -----------------------------------------------------------


class OldestFirst(FixedShares):
    """Names some of the requests; the others come after, and strangers are of no account."""

    def vacate(self, view: DeviceView, model: str, requests: Sequence[str]) -> Sequence[str]:
        return ["stranger", *requests[:1]]


@pytest.mark.parametrize("memory", [None, OldestFirst()])
def test_who_is_preempted_for_pages_asked_back(memory: MemoryPolicy | None) -> None:
    """Two requests have their prompt in common, on borrowed pages; the model's share is used up."""
    a = spec("a", 10, max_model_len=2048)
    world = World([a, spec("b", 10)], 40, "static", memory=memory)
    state, heap = world.state, world.device._heap
    meet(world)
    lease = Lease(0, 1, PEER, state.settings.name, tuple(range(12)))
    heap.schedule(0.01, PagesLentEvent(lease))
    world.device.submit(asked("first", "a", 500, 120, at=0.02))
    one = asked("one", "a", 300, 200, at=0.03)
    world.device.submit(one)
    world.device.submit(replace(one, id="two", arrival=0.2))
    world.device.advance(0.3)
    kv = state.models["a"].kv
    assert kv.pages == kv.bounds.limit == 10
    assert kv.borrowed.pages > 0
    heap.schedule(0.3, PagesRecalledEvent(lease))
    world.device.advance(0.32)
    assert kv.borrowed.pages == 0
    entries = [e for e in world.device.story.entries if e.get("by") == "lender"]
    assert {e["action"] for e in entries} == {"Preempt"}
    youngest_first = ["two", "one"]
    # The first slab is one of both; `first` has grown onto the last.
    assert [e["request_id"] for e in entries][:2] == (
        youngest_first if memory is None else youngest_first[::-1]
    )
    end(world, 1.0)


# -- all are stuck --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Helpless(FixedShares):
    """Has nothing that helps where all are stuck."""

    answer: tuple[Action, ...] = ()

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        (),
        (Recall(PEER, None, 1.0, "nothing is lent"),),
        (DropCache("nobody", 1, "no such model"),),
        (Hold("b", held=False, why="it changes nothing, again and again"),),
    ],
)
def test_a_policy_without_a_remedy_keeps_nobody_waiting(answer: tuple[Action, ...]) -> None:
    """What all policies share is done then: the request that cannot be served fails."""
    specs = [spec("a", 10, max_model_len=2048), spec("b", 10)]
    world = World(specs, 60, "static", memory=Helpless(answer=answer))
    world.device.submit(asked("first", "a", 300, 200))
    world.device.submit(asked("old", "a", 1000, 20, at=0.01))
    world.device.submit(asked("new", "a", 100, 20, at=0.02))
    wider = Change(model="b", slo=Slo(), priority=0, max_waiting=9, queue_seconds=None, share=3.0)
    world.device._operate(0.1, wider)
    end(world, 0.1)
    failed = {id: e.reason for id, e in world.ends.items() if isinstance(e, FailedOutput)}
    assert list(failed) == ["old"]
    assert "alone it would have 10" in failed["old"]
    assert set(world.ends) == {"first", "old", "new"}
