"""Simulate one device: the live engine loop, over lanes and a link that only take time.

`SimDevice` is the counterpart of `LiveDevice`. No model runs and no bytes are stored: durations
come from a `MachineProfile`, and memory is bookkeeping (`vm_null`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence

from ballast.core.actions import Join, Leave, LoopCommand
from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.entries import Sink
from ballast.core.errors import ConfigError
from ballast.core.event import (
    ArrivalEvent,
    CancelledOutput,
    CommandEvent,
    DrainEvent,
    Event,
    Output,
)
from ballast.core.model import ModelSpec
from ballast.core.request import Request, Submission
from ballast.core.settings import DeviceSettings
from ballast.core.story import Story
from ballast.core.view import Residency
from ballast.engine.build import Hosted, build_newcomer, build_state
from ballast.engine.loop import Loop
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.memory.vm_null import NullVm
from ballast.policy.fleet.replica_choice import LinkUse
from ballast.policy.presets import Preset
from ballast.policy.requirements import Requirements
from ballast.sim.decoding import DecodeBatch, tokens_of
from ballast.sim.in_place import InPlaceReads, KnobSetting
from ballast.sim.job_spread import JobFactors
from ballast.sim.layer_passes import LayerSource
from ballast.sim.layer_stream import SimStreams
from ballast.sim.leap import leap
from ballast.sim.link import Path, Route, SimLink
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.page_costs import LoopTime, TimedVm
from ballast.sim.runner import SimRunner
from ballast.sim.steps_ahead import StepsAheadHeap
from ballast.sim.world import World
from ballast.weights.weight_stream import Loads

SendOutput = Callable[[float, Output], None]
"""Called with (time, output) for each output to a client."""
SendTokens = Callable[[Sequence[str], Sequence[float]], None]
"""Called with request ids and times: each of the requests got a token at each time, in order."""
OnDeviceTurn = Callable[[float, DeviceState], None]
"""Called with the time and the state when a turn, and the leap that follows it, have ended."""


COUNTED = ("activations", "evictions", "preemptions")
"""Counts of decisions that each model keeps."""


class SimDevice:
    """A simulated device, in a world of its own or in one that it shares with others.

    Its clock is the world's, ahead of it only while it leaps.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        specs: Sequence[ModelSpec],
        preset: Preset,
        profile: MachineProfile,
        send: SendOutput,
        sink: Sink | None = None,
        observe: OnDeviceTurn | None = None,
        leaps: bool = True,
        world: World | None = None,
        path: Path | None = None,
        steps: SendTokens | None = None,
    ) -> None:
        """Build as `simulate` does. `world`: the world to join (None: its own); `path`: the route
        of its bytes there; `steps` gets tokens that leaps pass over, in place of `send`.

        Raises ConfigError where the budget holds no job's activations, and for a device of several
        ranks: a group is simulated as a device of larger pages (`sim.cluster`).
        """
        if settings.tensor_parallel > 1:
            allowed = "devices of one rank: how long several ranks take is not simulated"
            raise ConfigError("tensor_parallel", settings.tensor_parallel, allowed)
        self._world = World() if world is None else world
        self.clock = VirtualClock()
        self._heap = StepsAheadHeap(self.clock, profile.ahead, self._world.agenda)
        calls, needs = LoopTime(self.clock), preset.requires
        self.link = self._make_link(settings, profile, path, calls)
        self._streams = SimStreams(self._heap, self.clock, self.link, profile.early, needs.dirty)
        self.state = self._make_state(settings, specs, profile, calls, needs)
        self._machine, self._knob = profile.in_place, KnobSetting.of(preset.values)
        self.in_place = {s.name: self._reads(s, profile.costs[s.name]) for s in specs}
        self._specs = {s.name: s for s in specs}
        self._costs, self._overhead = dict(profile.costs), profile.overhead
        self._runner = self._make_runner(settings, profile, calls)
        self.story = Story(sink=sink, overhead=profile.overhead)
        self._client, self._answer = send, profile.answer
        self._leaps, self._steps, self._observe = leaps, steps, observe
        self.unsaid: Container[str] = ()
        """Requests whose end here is not sent to clients: they continue on another device."""
        self._answers: dict[str, str | None] = {}
        """Reasons of refused operations, by id; only of operations that have ended."""
        self._leaving: dict[str, ModelState] = {}
        """By the id of the operation."""
        self._on_refusal: dict[str, Callable[[], None]] = {}
        self._left: Counter[str] = Counter()
        self._loop = Loop(
            self.state,
            preset,
            self._heap,
            self._runner,
            self.clock,
            self._tell,
            self.story,
            self._answered,
        )
        self._loop.begin()
        self._world.add(self)

    def _make_link(
        self, settings: DeviceSettings, profile: MachineProfile, path: Path | None, calls: LoopTime
    ) -> SimLink:
        fluid = self._world.fluid
        route = Route.alone(fluid, profile.link) if path is None else Route(fluid, path)
        mapping = profile.moving(settings.page_bytes)
        return SimLink(self._heap, self.clock, profile.link, mapping, route, calls)

    def _make_state(
        self,
        settings: DeviceSettings,
        specs: Sequence[ModelSpec],
        profile: MachineProfile,
        calls: LoopTime,
        needs: Requirements,
    ) -> DeviceState:
        vm = _memory(settings, profile, calls)
        known = profile.reading_in_place(specs) if needs.in_place else profile.lane_costs
        state = build_state(
            settings,
            [hosted_nowhere(spec) for spec in specs],
            vm,
            self.link,
            self.clock,
            copy_nothing,
            known,
            self._streams.make if settings.rotates or profile.early else None,
            needs.kv_swapping,
            stages_kv=needs.kv_staging,
        )
        if isinstance(vm, TimedVm):
            vm.owner_of = state.pool.ledger.owner_of
        return state

    def _make_runner(
        self,
        settings: DeviceSettings,
        profile: MachineProfile,
        calls: LoopTime,
    ) -> SimRunner:
        runner = SimRunner(
            self._heap,
            self.clock,
            self._specs,
            self._costs,
            profile,
            self.link,
            self._streams,
            settings.parts,
            calls,
            JobFactors(profile.spread, settings.name),
        )
        runner.in_place = self.in_place
        return runner

    def _reads(self, spec: ModelSpec, resident: StepCosts) -> InPlaceReads:
        plan = lambda: self.state.models[spec.name].weights.plan  # noqa: E731
        return InPlaceReads(spec, resident, self._machine, self.link, plan, self._knob)

    @property
    def over(self) -> bool:
        """Whether the device has drained and all requests are answered."""
        return self.state.over

    @property
    def due(self) -> float:
        """Time of the loop's next turn, as far as known: changes in the queue may bring earlier
        events. inf if nothing is due, or the device is over."""
        if self.state.over:
            return math.inf
        event, timer = self._heap.next, self._loop.until
        if timer is None:
            return math.inf if event is None else event
        return timer if event is None or timer < event else event

    @property
    def open_requests(self) -> int:
        """Requests that have been sent here and have not ended, as of its clock. They count from
        when they are routed, as in the live controller: of those that arrive at one moment, each
        is routed by what the ones before it got."""
        return len(self.state.requests) + self._heap.undelivered

    def held_tokens(self, submission: Submission) -> int:
        """Number of a request's prompt tokens whose KV is on the device, as of its clock."""
        m, adapter = self.state.named[submission.model]
        return m.kv.held_tokens(submission.prompt, Request.salt_of(submission, m.spec, adapter))

    def has_weights(self, name: str) -> bool:
        """Whether the weights of a model, or of an adapter's base, are on the device, as of its
        clock."""
        m, _ = self.state.named[name]
        return m.residency is Residency.RESIDENT

    def link_use(self, submission: Submission) -> LinkUse | None:
        """Return what a request's model, and those that are active here, read over the host's link;
        None where weights are not read in place. As of the device's clock."""
        if not self.state.weights_in_place:
            return None
        m, _ = self.state.named[submission.model]
        coming = {self.state.named[name][0].spec.name for name in self._heap.undelivered_models}
        open_here = {r.model for r in self.state.requests.values()} | coming
        return LinkUse(
            host=id(self._world),
            capacity=self.link.bytes_per_second,
            model=m.spec.name,
            demand=self.in_place[m.spec.name].demand,
            active={name: self.in_place[name].demand for name in sorted(open_here)},
            prefill_seconds=m.costs.prefill_seconds(len(submission.prompt)),
            ttft=m.spec.slo.ttft,
        )

    def join(self, now: float, spec: ModelSpec, costs: StepCosts) -> str | None:
        """Start serving a model at `now`; returns the reason if it is refused."""
        known = costs.after(self._overhead)
        m, shared = build_newcomer(self.state, hosted_nowhere(spec), copy_nothing, known)
        self._loop.commands.ready[spec.name] = m, shared
        self._specs[spec.name], self._costs[spec.name] = spec, costs
        self.in_place[spec.name] = self._reads(spec, costs)
        refused = self._operate(now, Join(spec.name))
        if refused is not None:
            m.kv.close()
            m.weights.close()
        return refused

    def leave(self, now: float, model: str) -> None:
        """Accept no requests for `model` from `now` on, and remove it when its open requests have
        ended."""
        m = self.state.models[model]
        self._leaving[self._next] = m
        self._operate(now, Leave(model))

    def did(self, what: str) -> int:
        """Counts over all models, including those that have left: `activations`, `preemptions`."""
        counts: list[int] = [getattr(m, what) for m in self.state.models.values()]
        return self._left[what] + sum(counts)

    @property
    def loads(self) -> dict[str, Loads]:
        """Costs of rotations by model; models without any are left out."""
        return {name: loads for name, loads in self._streams.loads.items() if loads.n}

    def submit(self, submission: Submission) -> None:
        """Schedule a request at its `arrival`, or now if that is past."""
        self._heap.schedule(submission.arrival, ArrivalEvent(submission))

    def advance(self, until: float) -> None:
        """Process everything in the device's world that is due before `until`."""
        self._world.advance(until)

    def drain(self, at: float) -> None:
        """Stop accepting requests at `at`."""
        self._heap.schedule(at, DrainEvent())

    def finish(self, drained_from: float) -> None:
        """Drain, and run until everything has been answered."""
        self.drain(drained_from)
        self.end()

    def end(self) -> None:
        """Run until everything has been answered. The device must have been drained."""
        self._world.finish(self)
        self._loop.end()

    def turn(self, until: float) -> None:
        """Turn its loop at `due`, and leap (`sim.leap`) before `until`."""
        if not self._heap.ready(self._loop.until):
            return
        running = self.state.lanes.alone
        if self._loop.turn() and running is not None and self.state.lanes.alone is running:
            self._runner.turned(running)
        if self._leaps:
            near, horizon = self._world.bounds(self, self.clock.now(), until)
            leap(self._loop, self._heap, self._runner, self.clock, self._passed, horizon, near)
        if self._observe is not None:
            self._observe(self.clock.now(), self.state)

    def receive(self, at: float, event: Event) -> None:
        """Schedule an external `event` at `at`."""
        self._heap.schedule(at, event)

    def order(
        self,
        at: float,
        id: str,
        operation: LoopCommand,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Schedule a command at `at`; `refused` is called if it is refused or fails."""
        self._on_refusal[id] = refused
        self.receive(at, CommandEvent(id, operation))

    def borrows_over(self, source: Callable[[str], LayerSource]) -> None:
        """Set the sources, by model, through which jobs read KV on borrowed pages."""
        self._runner.borrowed = source

    @property
    def _next(self) -> str:
        return f"operation-{len(self._answers) + len(self._loop.commands.pending) + 1}"

    def _operate(self, now: float, operation: LoopCommand) -> str | None:
        """Done at `now`; why not, if that is known then."""
        id = self._next
        self._heap.schedule(now, CommandEvent(id, operation))
        self.advance(math.nextafter(now, math.inf))
        return self._answers.get(id)

    def _answered(self, id: str, refused: str | None) -> None:
        self._answers[id] = refused
        on_refusal = self._on_refusal.pop(id, None)
        if on_refusal is not None and refused is not None:
            on_refusal()
        m = self._leaving.pop(id, None)
        if m is not None and refused is None:
            self._left.update({what: getattr(m, what) for what in COUNTED})

    def _tell(self, outputs: list[Output]) -> None:
        for output in outputs:
            if not (isinstance(output, CancelledOutput) and output.request_id in self.unsaid):
                self._said(self.clock.now(), output)

    def _passed(self, steps: Sequence[DecodeBatch]) -> None:
        """Handle the steps that a leap has passed over."""
        if self._steps is None:
            for at, token in tokens_of(steps):
                self._said(at, token)
            return
        for batch in dict.fromkeys(steps):
            self._steps(batch.ids, [at + self._answer for at in batch.ends])

    def _said(self, now: float, output: Output) -> None:
        self._client(now + self._answer, output)


def hosted_nowhere(spec: ModelSpec) -> Hosted:
    """Do nothing: there is no host tier."""
    return Hosted(spec, [0] * len(spec.segment_bytes))


def copy_nothing(dst: int, src: int, n_bytes: int) -> None:
    """Do nothing: there are no bytes."""


def _memory(settings: DeviceSettings, profile: MachineProfile, calls: LoopTime) -> NullVm:
    """Build a vm without memory; mapping takes the loop's time where the profile has its cost."""
    n_pages = settings.budget_bytes // settings.page_bytes
    if profile.pages is None:
        return NullVm(settings.page_bytes, n_pages)
    return TimedVm(settings.page_bytes, n_pages, profile.pages, calls)
