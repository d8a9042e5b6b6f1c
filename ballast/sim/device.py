"""One device in virtual time: memory without bytes, a lane and a link that cost, the same loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.event import Arrival, Drain, Output
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings
from ballast.core.story import Sink, Story
from ballast.engine.build import Hosted, build_state
from ballast.engine.loop import Loop
from ballast.engine.state import DeviceState
from ballast.memory.vm_null import NullVm
from ballast.policy.presets import Preset
from ballast.sim.heap import EventHeap
from ballast.sim.leap import Said, leap
from ballast.sim.runner import SimLink, SimRunner

Observe = Callable[[float, DeviceState], None]
"""Sees the time and the state after a turn, and the leap that follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a simulation needs to know of a machine."""

    costs: Mapping[str, StepCosts]
    """By model name."""
    link_bytes_per_second: float
    overhead: float
    """The engine's own seconds per job."""


class SimDevice:
    """A device that has its own clock: it is told how far to go."""

    def __init__(
        self,
        settings: DeviceSettings,
        specs: Sequence[ModelSpec],
        preset: Preset,
        profile: Profile,
        said: Said,
        sink: Sink | None = None,
        observe: Observe | None = None,
        leaps: bool = True,
    ) -> None:
        """As `simulate`. Raises ConfigError where the budget holds no job's activations."""
        self.clock = VirtualClock()
        self._heap = EventHeap(self.clock)
        link = SimLink(self._heap, self.clock, profile.link_bytes_per_second)
        vm = NullVm(settings.page_bytes, settings.budget_bytes // settings.page_bytes)
        hosted = [Hosted(spec, [0] * len(spec.segment_bytes)) for spec in specs]
        self.state = build_state(
            settings, hosted, vm, link, self.clock, lambda dst, src, n: None, profile.costs
        )
        self._runner = SimRunner(
            self._heap, self.clock, {s.name: s for s in specs}, profile.costs, profile.overhead
        )
        self.story = Story(sink=sink)
        self._said = said
        self._leaps = leaps
        self._observe = observe
        self._loop = Loop(
            self.state, preset, self._heap, self._runner, self.clock, self._tell, self.story
        )
        self._loop.begin()

    @property
    def open_requests(self) -> int:
        """Requests that have arrived and have not ended, as of its clock."""
        return len(self.state.requests)

    def submit(self, submission: Submission) -> None:
        """It will arrive at its `arrival`, or now if that is past."""
        self._heap.schedule(submission.arrival, Arrival(submission))

    def advance(self, until: float) -> None:
        """Let everything happen that is due before `until`."""
        while not self.state.over and (due := self._due) is not None and due < until:
            self._turn(until)

    def finish(self, drained_from: float) -> None:
        """Nothing arrives after `drained_from`; go on until everything has been answered."""
        self._heap.schedule(drained_from, Drain())
        while not self.state.over:
            self._turn(float("inf"))
        self._loop.end()

    @property
    def _due(self) -> float | None:
        """When it turns next."""
        times = [t for t in (self._heap.next, self._loop.until) if t is not None]
        return min(times, default=None)

    def _turn(self, until: float) -> None:
        self._loop.turn()
        if self._leaps:
            leap(self._loop, self._heap, self._runner, self.clock, self._said, until)
        if self._observe is not None:
            self._observe(self.clock.now(), self.state)

    def _tell(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._said(self.clock.now(), output)
