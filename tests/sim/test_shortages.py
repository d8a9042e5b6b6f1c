"""Shortages in virtual time, from arrival to answer: nothing is undone in vain, nobody waits for
pages that lie free, and who fails is who cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.core.actions import Change, Lend
from ballast.core.cost import activation_bytes
from ballast.core.event import CommandEvent, FailedOutput, FinishedOutput, Output
from ballast.core.lease import (
    Lease,
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerMetEvent,
)
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.memory.vm_null import NullVm
from ballast.policy.base import MemoryPolicy
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.sim.test_simulate import COSTS, PAGE, fleet, spec

PEER = "cpu:1"


class World:
    """One device of `pages` pages beside its activations."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        pages: int,
        preset: str = "balloon",
        lanes: int = 1,
        leaps: bool = True,
        memory: MemoryPolicy | None = None,
    ) -> None:
        """`memory` decides in place of the preset's memory policy, if it is given."""
        chosen = resolve(preset)
        settings = fleet(preset, list(specs), pages, lanes=lanes, threads=lanes).device
        arena = max(activation_bytes(s, settings.step_tokens, settings.step_logits) for s in specs)
        more = (lanes - 1) * arena
        settings = replace(settings, budget_bytes=settings.budget_bytes + more)
        profile = MachineProfile(
            costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=0.0
        )
        self.ends: dict[str, FinishedOutput | FailedOutput] = {}
        self.device = SimDevice(
            settings,
            specs,
            chosen if memory is None else replace(chosen, memory=memory),
            profile,
            self._said,
            observe=self._observe,
            leaps=leaps,
        )
        self.state: DeviceState = self.device.state

    def _said(self, now: float, output: Output) -> None:
        if isinstance(output, FinishedOutput | FailedOutput):
            assert output.request_id not in self.ends
            self.ends[output.request_id] = output

    def _observe(self, now: float, state: DeviceState) -> None:
        state.pool.validate()
        for m in state.models.values():
            m.kv.validate([r.blocks for r in m.running])
            m.weights.validate()
        assert now < 60, "it goes on for ever"

    def finished(self, request: str) -> FinishedOutput:
        end = self.ends[request]
        assert isinstance(end, FinishedOutput)
        return end


def asked(id: str, model: str, prompt: int, n: int, at: float = 0.0, **more: int) -> Submission:
    tokens = tuple(1 + (k * 7 + sum(id.encode())) % 500 for k in range(prompt))
    return Submission(
        id=id, model=model, prompt=tokens, max_tokens=n, arrival=at, ignore_eos=True, **more
    )


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_what_two_victims_give_up_is_not_taken_by_them_again(lanes: int) -> None:
    """They give it up one after the other, as their jobs end."""
    long = {"max_model_len": 2048}
    world = World([spec("a", 10, **long), spec("b", 10, **long), spec("w", 12)], 34, lanes=lanes)
    for name in "ab":
        world.device.submit(asked(name, name, 200, 1200))
    world.device.submit(asked("urgent", "w", 100, 10, at=0.3, priority=5))
    world.device.finish(0.3)
    assert world.finished("urgent").preemptions == 0
    undone = sum(world.finished(name).preemptions for name in "ab")
    assert 0 < undone <= 4


def test_a_second_turn_keeps_its_cached_prefix_when_pages_are_short() -> None:
    long = {"max_model_len": 4096}
    world = World([spec("a", 10, **long), spec("b", 10, **long)], 20 + 40)
    first = asked("first", "a", 1600, 2)
    world.device.submit(first)
    world.device.submit(asked("other", "b", 705, 60, at=0.85))
    second = replace(
        asked("second", "a", 1700, 20, at=0.92), prompt=(*first.prompt, *range(1, 301))
    )
    world.device.submit(second)
    world.device.finish(1.0)
    assert world.finished("second").cached_tokens >= 1584
    assert world.finished("other").preemptions == 0


def test_models_that_fit_come_while_an_older_claim_waits() -> None:
    """`big` cannot come before `a`, which came first, has ended."""
    specs = [spec("a", 40), spec("big", 60), spec("small", 10)]
    world = World(specs, 80, "balloon+round-robin")  # which lets nobody wait for its turn
    world.device.submit(asked("a", "a", 100, 400))
    world.device.submit(asked("big", "big", 100, 10, at=0.1))
    world.device.submit(asked("small", "small", 100, 10, at=0.2))
    world.device.finish(0.2)
    assert list(world.ends) == ["small", "a", "big"]


def test_the_request_that_cannot_be_served_fails_and_no_other() -> None:
    """Its model's share was larger when it arrived; those behind it fit into what is left."""
    world = World([spec("a", 10, max_model_len=2048), spec("b", 10)], 60, "static")
    world.device.submit(asked("first", "a", 300, 200))
    world.device.submit(asked("old", "a", 1000, 20, at=0.01))
    for i in range(3):
        world.device.submit(asked(f"new-{i}", "a", 100, 20, at=0.02 + 0.01 * i))
    wider = Change(model="b", slo=Slo(), priority=0, max_waiting=9, queue_seconds=None, share=3.0)
    world.device._operate(0.1, wider)
    world.device.finish(0.1)
    failed = {id: end for id, end in world.ends.items() if isinstance(end, FailedOutput)}
    assert list(failed) == ["old"]
    assert "it needs 16 pages of KV cache, and alone it would have 10" in failed["old"].reason


def test_a_model_is_not_pinned_where_another_could_never_be_served() -> None:
    """Its open requests would wait for as long as the pinned one has some."""
    world = World([spec("a", 30), spec("b", 20), spec("c", 10)], 45)
    world.device.submit(asked("b", "b", 100, 200))
    world.device.submit(asked("a", "a", 100, 10, at=0.05))
    pin = Change(model="b", slo=Slo(), priority=3, max_waiting=9, queue_seconds=None, pinned=True)
    refused = world.device._operate(0.1, pin)
    assert refused is not None
    assert "a needs a device of at least" in refused
    assert "for weights, those of pinned models among them" in refused
    b = world.state.models["b"].spec
    assert (b.pinned, b.priority) == (False, 0)
    assert world.device._operate(0.1, replace(pin, model="c")) is None
    assert world.device._operate(0.1, replace(pin, model="c", priority=4)) is None
    c = world.state.models["c"].spec
    assert (c.pinned, c.priority) == (True, 4)
    world.device.finish(0.1)
    assert all(isinstance(end, FinishedOutput) for end in world.ends.values())


def test_a_busy_lender_recalls_what_a_request_lacks() -> None:
    """Not only once nothing goes on any more."""
    # In turns, `b` takes its pages as soon as they are there.
    world = World([spec("a", 10), spec("b", 10)], 60, "balloon+round-robin")
    sent: list[LendingMessage] = []
    state = world.state
    state.lending.send = sent.append
    state.lending.exports[PEER, 1] = NullVm(PAGE, 100).export(())
    heap = world.device._heap
    heap.schedule(0.0, PeerMetEvent(PEER, 1, 100))
    heap.schedule(0.01, CommandEvent("lend", Lend(PEER, 42)))
    world.device.submit(asked("a", "a", 100, 400, at=0.02))
    world.device.submit(asked("b", "b", 100, 10, at=0.1))
    world.device.advance(0.2)
    (recalled,) = (word.lease for word in sent if isinstance(word, PagesRecalledEvent))
    assert "a" not in world.ends
    heap.schedule(0.2, PagesReturnedEvent(recalled))
    world.device.finish(0.2)
    assert list(world.ends) == ["b", "a"]
    assert world.finished("a").preemptions == 0


def test_policies_see_the_link_as_a_live_device_measures_it() -> None:
    """Mapping takes time in the loop, and is not the link's."""
    specs = [spec("a", 10)]
    settings = fleet("balloon", specs, 60).device
    link = LinkRates.even(1e8)
    profile = MachineProfile(costs={"a": COSTS}, link=link, overhead=0.0, page_seconds=1e-3)
    device = SimDevice(settings, specs, resolve("balloon"), profile, lambda now, output: None)
    assert device_view(device.state).link_bytes_per_second == link.to_device


@pytest.mark.parametrize("leaps", [False, True])
def test_pages_asked_back_cost_nobody_a_cache_that_makes_no_room_for_them(leaps: bool) -> None:
    """What stands in the way is the model's own share, not what others have cached."""
    world = World([spec("a", 10, max_model_len=2048), spec("b", 10)], 40, "static", leaps=leaps)
    state, heap = world.state, world.device._heap
    state.lending.exports[PEER, 1] = NullVm(PAGE, 100).export(())
    lease = Lease(0, 1, PEER, state.settings.name, tuple(range(12)))
    heap.schedule(0.0, PeerMetEvent(PEER, 1, 100))
    heap.schedule(0.01, PagesLentEvent(lease))
    world.device.submit(asked("cached", "b", 400, 2, at=0.02))
    for i in range(2):
        world.device.submit(asked(f"a-{i}", "a", 400, 200, at=0.1))
    world.device.advance(0.3)
    a, b = (state.models[name].kv for name in "ab")
    assert a.pages == a.bounds.limit
    assert a.borrowed.pages > 0
    cached = b.counts.cached_pages
    assert cached >= 6
    heap.schedule(0.3, PagesRecalledEvent(lease))
    world.device.advance(0.32)
    assert (a.borrowed.pages, b.counts.cached_pages) == (0, cached)
    assert state.models["a"].preemptions == 1
    world.device.finish(1.0)
    assert all(isinstance(end, FinishedOutput) for end in world.ends.values())


@pytest.mark.parametrize("leaps", [False, True])
def test_pages_asked_back_take_the_place_of_cached_prefixes_and_no_more(leaps: bool) -> None:
    world = World(
        [spec("a", 10, max_model_len=2048), spec("b", 10, max_model_len=2048)], 40, leaps=leaps
    )
    state, heap = world.state, world.device._heap
    state.lending.exports[PEER, 1] = NullVm(PAGE, 100).export(())
    lease = Lease(0, 1, PEER, state.settings.name, tuple(range(12)))
    heap.schedule(0.0, PeerMetEvent(PEER, 1, 100))
    heap.schedule(0.01, PagesLentEvent(lease))
    world.device.submit(asked("b", "b", 800, 2, at=0.02))
    for i in range(2):
        world.device.submit(asked(f"a-{i}", "a", 300, 100, at=0.2))
    world.device.advance(0.3)
    a, b = (state.models[name].kv for name in "ab")
    abroad, cached = a.borrowed.pages, b.counts.cached_pages
    assert 0 < abroad < cached
    heap.schedule(0.3, PagesRecalledEvent(lease))
    world.device.advance(0.32)
    assert (a.borrowed.pages, b.counts.cached_pages) == (0, cached - abroad + state.pool.free)
    world.device.finish(0.5)
    assert [world.finished(f"a-{i}").preemptions for i in range(2)] == [0, 0]
