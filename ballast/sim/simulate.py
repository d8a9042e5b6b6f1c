"""Serve a workload in virtual time: a memory without bytes, lanes that cost, the same loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.event import Arrival, Drain, Output
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.story import Sink, Story
from ballast.engine.build import Hosted, build_state
from ballast.engine.loop import Loop
from ballast.engine.state import DeviceState
from ballast.memory.vm_null import NullVm
from ballast.policy.presets import resolve
from ballast.sim.heap import EventHeap
from ballast.sim.leap import leap
from ballast.sim.runner import SimLink, SimRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a simulation needs to know of a machine."""

    costs: Mapping[str, StepCosts]
    """By model name."""
    link_bytes_per_second: float
    overhead: float
    """The engine's own seconds per job."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a run."""

    seconds: float
    """Virtual time at the end."""
    state: DeviceState
    story: Story


def simulate(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    arrivals: Iterable[Submission],
    profile: Profile,
    said: Callable[[float, Output], None],
    sink: Sink | None = None,
    observe: Callable[[float, DeviceState], None] | None = None,
    leaps: bool = True,
) -> Simulated:
    """Run `arrivals` (each at its `arrival` second) to the last answer.

    `said(now, output)` gets what clients would be told; `observe(now, state)` sees the state
    after each turn. Equal arguments give equal runs; with or without `leaps` (`sim/leap.py`) the
    answers, their times and the books are the same, only faster. Where `observe` is given there are
    none.
    """
    clock = VirtualClock()
    heap = EventHeap(clock)
    link = SimLink(heap, clock, profile.link_bytes_per_second)
    vm = NullVm(fleet.device.page_bytes, fleet.device.budget_bytes // fleet.device.page_bytes)
    hosted = [Hosted(spec, [0] * len(spec.segment_bytes)) for spec in specs]
    state = build_state(
        fleet.device, hosted, vm, link, clock, copy=lambda dst, src, n: None, costs=profile.costs
    )
    runner = SimRunner(heap, clock, {s.name: s for s in specs}, profile.costs, profile.overhead)
    last = 0.0
    for submission in arrivals:
        heap.schedule(submission.arrival, Arrival(submission))
        last = max(last, submission.arrival)
    heap.schedule(last, Drain())

    def tell(outputs: list[Output]) -> None:
        for output in outputs:
            said(clock.now(), output)

    story = Story(sink=sink)
    loop = Loop(state, resolve(fleet.preset, fleet.options), heap, runner, clock, tell, story)
    if observe is not None:
        watch = observe
        loop.on_turn = lambda: watch(clock.now(), state)
    loop.begin()
    while not state.over:
        loop.turn()
        if leaps and observe is None:
            leap(loop, heap, runner, clock, said)
    loop.end()
    return Simulated(clock.now(), state, story)
