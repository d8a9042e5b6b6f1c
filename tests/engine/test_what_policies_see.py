"""What policies see of requests and traffic is what happened, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import Change
from ballast.core.event import CommandEvent, FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.core.traffic import TrafficStats
from ballast.core.view import RequestView
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.engine.fresh import check_views
from tests.sim.test_simulate import COSTS, fleet, spec, submissions

LEVELS = {"m": Slo(ttft=0.5, tpot=0.05), "tuned": Slo(ttft=3.0, tpot=0.3)}
CHANGED = Slo(ttft=7.0, tpot=0.7)


def adapted(name: str) -> ModelSpec:
    tuned = AdapterSpec(name="tuned", fingerprint="1", rank=1, slo=LEVELS["tuned"])
    return spec(name, slo=LEVELS[name], adapters=(tuned,), max_running=4)


class World:
    """A device short of memory, and what its clients got."""

    def __init__(self, pages: int = 30) -> None:
        specs = [adapted("m")]
        made = fleet("balloon", specs, pages)
        profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e8), overhead=1e-4)
        self.times: dict[str, list[float]] = {}
        self.ended: dict[str, FinishedOutput] = {}
        self.levels = dict(LEVELS)
        self.sent: dict[str, Submission] = {}
        self.seen = 0
        self.device = SimDevice(
            made.device, specs, resolve("balloon"), profile, self.hear, observe=self.look
        )

    def hear(self, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            self.times.setdefault(output.request_id, []).append(at)
        elif isinstance(output, FinishedOutput):
            self.ended[output.request_id] = output

    def submit(self, s: Submission) -> None:
        self.sent[s.id] = s
        self.device.submit(s)

    def look(self, now: float, state: DeviceState) -> None:
        state.validate()
        check_views(state)
        view = device_view(state)
        m = view.model("m")
        for r in (*m.waiting, *m.running):
            self.check(r)
            self.seen += 1
        came = [s.arrival for s in self.sent.values() if s.arrival <= now and s.resumed is None]
        traffic = TrafficStats.since(0.0)
        for at in came:
            traffic = traffic.arrived(at)
        assert m.arrival_rate(now) == pytest.approx(traffic.arrivals.per_second(now))
        for end in self.ended.values():
            traffic = traffic.ended(end.prompt_tokens, end.output_tokens)
        assert (m.traffic.prompts, m.traffic.outputs) == (traffic.prompts, traffic.outputs)

    def check(self, r: RequestView) -> None:
        sent, level = self.sent[r.id], self.levels[self.sent[r.id].model]
        times = [*(0.0 for _ in sent.resumed or ()), *self.times.get(r.id, [])]
        assert (r.due, r.pace) == (sent.arrival + level.ttft, level.tpot)
        assert (r.generated, r.max_tokens) == (len(times), sent.max_tokens)
        assert r.tokens == len(sent.prompt) + r.generated
        assert r.left == sent.max_tokens - r.generated
        if self.times.get(r.id):
            assert (r.first, r.last) == (self.times[r.id][0], self.times[r.id][-1])
        else:
            assert (r.first, r.last) == (None, sent.arrival)


def test_requests_are_seen_with_their_deadlines_and_lengths() -> None:
    world = World()
    for s in submissions(["m", "tuned"], 40, seed=3, rate=60.0):
        world.submit(s)
    world.device.advance(0.6)
    m = world.device.state.models["m"]
    assert m.waiting
    assert m.running
    world.levels["m"] = CHANGED
    change = Change(
        model="m",
        slo=CHANGED,
        priority=0,
        share=1.0,
        max_running=4,
        max_waiting=100,
        queue_seconds=None,
        pinned=False,
        ttl=None,
    )
    world.device._heap.schedule(0.6, CommandEvent("change", change))
    world.device.finish(1.0)
    assert len(world.ended) == 40
    assert m.preemptions > 0
    assert world.seen > 1000


def test_what_another_worker_accepted_is_no_arrival() -> None:
    world = World(400)
    sent = Submission(id="new", model="m", prompt=(1,) * 20, max_tokens=9, ignore_eos=True)
    world.submit(sent)
    world.submit(replace(sent, id="resumed", resumed=(5, 6, 7)))
    world.device.finish(1.0)
    assert world.ended["resumed"].output_tokens == 9
    assert world.device.state.models["m"].traffic.outputs.n == 2


def test_a_rate_decays_while_the_snapshot_stays() -> None:
    world = World(400)
    world.submit(Submission(id="a", model="m", prompt=(1,) * 20, max_tokens=2, ignore_eos=True))
    world.device.advance(1.0)
    before = device_view(world.device.state).model("m")
    world.device.clock.advance_to(121.0)
    world.device.state.now = 121.0
    view = device_view(world.device.state)
    assert view.model("m") is before
    assert before.arrival_rate(view.now) < 0.2 * before.arrival_rate(1.0)
