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
    CancelEvent,
    CancelledOutput,
    CommandEvent,
    DrainEvent,
    Event,
    Output,
)
from ballast.core.fleet_state import OPERATOR
from ballast.core.model import ModelSpec
from ballast.core.request import Request, RequestState, Submission
from ballast.core.settings import DeviceSettings
from ballast.core.story import Story
from ballast.engine.build import build_newcomer, build_state
from ballast.engine.loop import Loop
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.policy.c2cserve_knob import KnobSetting
from ballast.policy.presets import Preset
from ballast.policy.requirements import Requirements
from ballast.sim.decoding import DecodeBatch, tokens_of
from ballast.sim.in_place import InPlaceReads
from ballast.sim.job_spread import JobFactors
from ballast.sim.kv_tiers import VirtualStore, sim_tiers
from ballast.sim.layer_passes import LayerSource
from ballast.sim.layer_stream import SimStreams
from ballast.sim.leap import leap
from ballast.sim.link import Route, SimLink
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.no_bytes import hosted_nowhere, vm_of
from ballast.sim.page_costs import HomeCopies, LoopTime, TimedVm
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
OnAnswer = Callable[[str | None], None]
"""Called when a command has ended, with the reason if it was refused."""
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
        route: Route | None = None,
        steps: SendTokens | None = None,
        kv_store: VirtualStore | None = None,
    ) -> None:
        """Build as `simulate` does. `world`: the world to join (None: its own); `route`: that
        of its bytes; `steps` gets tokens that leaps pass over; with a `kv_store` it does not leap.

        Raises ConfigError where the budget holds no job's activations, and for a device of several
        ranks: a group is simulated as a device of larger pages (`sim.cluster`).
        """
        if settings.tensor_parallel > 1:
            allowed = "devices of one rank: how long several ranks take is not simulated"
            raise ConfigError("tensor_parallel", settings.tensor_parallel, allowed)
        self.world = World() if world is None else world
        self.clock = VirtualClock()
        self._settings, self._preset, self._profile = settings, preset, profile
        self.peers = profile.peers
        """Costs between it and other devices."""
        self._route, self._sink, self._kv_store = route, sink, kv_store
        self._specs = {s.name: s for s in specs}
        self._costs, self._overhead = dict(profile.costs), profile.overhead
        self._client, self._answer = send, profile.answer
        self._leaps, self._steps, self._observe = leaps and kv_store is None, steps, observe
        self.ends: dict[str, int] = {}
        """Positions of the last tokens of answers that end before their bounds, by request."""
        self.unsaid: Container[str] = ()
        """Requests whose end here is not sent to clients: they continue on another device."""
        self.on_restart: list[Callable[[], None]] = []
        """Called when a new worker serves in place of one that crashed, to connect it."""
        self.down = False
        """Whether its worker has crashed, and no other serves yet."""
        self._waiting: list[Submission] = []
        """Requests that wait for the next worker."""
        self._taken: set[str] = set()
        """Requests that have been taken back, and whose end here is not sent to clients."""
        self._drained_from: float | None = None
        self._answers: dict[str, str | None] = {}
        """Reasons of refused operations that have ended, by id."""
        self._leaving: dict[str, ModelState] = {}  # by the id of the operation
        self._on_answer: dict[str, OnAnswer] = {}
        self._left: Counter[str] = Counter()
        self._boot(specs)
        self.world.add(self)

    def _boot(self, specs: Sequence[ModelSpec]) -> None:
        """Build what a worker's process has: its memory, state and loop, and the events for it."""
        settings, profile, preset = self._settings, self._profile, self._preset
        self._heap = StepsAheadHeap(self.clock, profile.ahead, self.world.agenda)
        calls, needs = LoopTime(self.clock), preset.requires
        mapping = profile.moving(settings.page_bytes)
        route = self._route or Route.alone(self.world.fluid, profile.link)
        self.link = SimLink(self._heap, self.clock, profile.link, mapping, route, calls)
        parts = (self._heap, self.clock, self.link)
        self._streams = SimStreams(*parts, profile.early)
        self.state = self._make_state(settings, specs, profile, calls, needs)
        self.state.tiers.copies = sim_tiers(self._kv_store, *parts, route.fluid)
        self._machine, self._knob = profile.in_place, KnobSetting.of(preset.values)
        self.in_place = {s.name: self._reads(s, self._costs[s.name]) for s in specs}
        self._runner = self._make_runner(settings, profile, calls)
        self.story = Story(sink=self._sink, overhead=profile.overhead)
        tell = (self._tell, self.story, self._answered)
        self._loop = Loop(self.state, preset, self._heap, self._runner, self.clock, *tell)
        self._loop.begin()

    def crash(self) -> None:
        """End the worker, with all that it holds; open requests wait for `restart`. Bytes on their
        way go on to nowhere."""
        now = self.clock.now()
        self._waiting = [r.continued(now) for r in self._open] + self._heap.arrivals()
        self.down = True
        self._loop.commands.give_up("the worker is gone")

    def restart(self, at: float) -> None:
        """Let a new worker serve from `at` on: the same models, and the requests that wait."""
        self.clock.advance_to(at)
        for m in self.state.models.values():
            self._left.update({what: getattr(m, what) for what in COUNTED})
        self.down = False
        self._boot([m.spec for m in self.state.models.values()])
        for connect in self.on_restart:
            connect()
        waiting, self._waiting = self._waiting, []
        for submission in waiting:
            self.submit(submission)
        if self._drained_from is not None:
            self.drain(max(self._drained_from, at))

    def _make_state(
        self,
        settings: DeviceSettings,
        specs: Sequence[ModelSpec],
        profile: MachineProfile,
        calls: LoopTime,
        needs: Requirements,
    ) -> DeviceState:
        vm = vm_of(settings, profile.pages, calls)
        self.moves = HomeCopies(vm, calls)
        known = profile.reading_in_place(specs) if needs.in_place else profile.lane_costs
        state = build_state(
            settings,
            [hosted_nowhere(spec) for spec in specs],
            vm,
            self.link,
            self.clock,
            self.moves,
            known,
            self._streams.make if settings.rotates or profile.early else None,
            stages_kv=needs.kv_staging,
        )
        if isinstance(vm, TimedVm):
            vm.owner_of = state.pool.ledger.owner_of
        return state

    def _make_runner(
        self, settings: DeviceSettings, profile: MachineProfile, calls: LoopTime
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
        runner.in_place, runner.ends = self.in_place, self.ends
        return runner

    def _reads(self, spec: ModelSpec, resident: StepCosts) -> InPlaceReads:
        plan = lambda: self.state.models[spec.name].weights.plan  # noqa: E731
        return InPlaceReads(spec, resident, self._machine, self.link, plan, self._knob)

    @property
    def over(self) -> bool:
        """Whether the device has drained and all requests are answered."""
        return self.state.over and not self.down

    @property
    def due(self) -> float:
        """Time of the loop's next turn, as far as known: changes in the queue may bring earlier
        events. inf if nothing is due, or the device is over."""
        if self.state.over or self.down:
            return math.inf
        event, timer = self._heap.next, self._loop.until
        if timer is None:
            return math.inf if event is None else event
        return timer if event is None or timer < event else event

    @property
    def open_requests(self) -> int:
        """Requests that have been sent here and have not ended, as of its clock. They count as soon
        as they are routed, as live: each is routed by what the ones before it got."""
        if self.down:
            return len(self._waiting)
        return len(self.state.requests) + self._heap.undelivered

    @property
    def _open(self) -> list[Request]:
        ended = (RequestState.FINISHED, RequestState.FAILED)
        return [r for r in self.state.requests.values() if r.state not in ended]

    def open_models(self) -> list[str]:
        """Return the model or adapter of each open request, as `open_requests` counts them."""
        if self.down:
            return [s.model for s in self._waiting]
        here = [r.submission.model for r in self.state.requests.values()]
        return [*here, *self._heap.undelivered_models]

    def join(self, now: float, spec: ModelSpec, costs: StepCosts, by: str = OPERATOR) -> str | None:
        """Start serving a model at `now`; returns the reason if it is refused."""
        known = costs.after(self._overhead)
        m, shared = build_newcomer(self.state, hosted_nowhere(spec), self.moves, known)
        self._loop.commands.ready[spec.name] = m, shared
        self._specs[spec.name], self._costs[spec.name] = spec, costs
        self.in_place[spec.name] = self._reads(spec, costs)
        refused = self._operate(now, Join(spec.name), by)
        if refused is not None:
            m.kv.close()
            m.weights.close()
        return refused

    def take_back(self, now: float, spec: ModelSpec) -> list[Submission]:
        """End the open requests of a model here at `now`; returns each as it goes on elsewhere."""
        names = {s.name for s in spec.served}
        if self.down:
            taken = [s for s in self._waiting if s.model in names]
            self._waiting = [s for s in self._waiting if s.model not in names]
            return taken
        at = math.nextafter(now, math.inf)
        self.advance(at)  # what arrives now has arrived
        here = [r for r in self._open if r.submission.model in names]
        self._taken.update(r.id for r in here)
        for request in here:
            self.receive(at, CancelEvent(request.id))
        return [request.continued(now) for request in here]

    def is_leaving(self, model: str) -> bool:
        """Return whether a model is to be removed when its open requests have ended."""
        return any(m.spec.name == model for m in self._leaving.values())

    def leave(self, now: float, model: str, answered: OnAnswer, by: str = OPERATOR) -> None:
        """Refuse a model's requests from `now` on; remove it when its open ones have ended."""
        id = self._next
        self._leaving[id], self._on_answer[id] = self.state.models[model], answered
        self._operate(now, Leave(model), by)

    def did(self, what: str) -> int:
        """Counts over all models, including those that have left: `activations`, `preemptions`."""
        counts: list[int] = [getattr(m, what) for m in self.state.models.values()]
        return self._left[what] + sum(counts)

    @property
    def loads(self) -> dict[str, Loads]:
        """Costs of rotations, by model that has any."""
        return {name: loads for name, loads in self._streams.loads.items() if loads.n}

    def submit(self, submission: Submission) -> None:
        """Schedule a request at its `arrival`, or now if that is past."""
        self.receive(submission.arrival, ArrivalEvent(submission))

    def advance(self, until: float) -> None:
        """Process everything in the device's world that is due before `until`."""
        self.world.advance(until)

    def drain(self, at: float) -> None:
        """Stop accepting requests at `at`."""
        self._drained_from = at
        self.receive(at, DrainEvent())

    def finish(self, drained_from: float) -> None:
        """Drain, and run until everything has been answered."""
        self.drain(drained_from)
        self.end()

    def end(self) -> None:
        """Run until everything has been answered. The device must have been drained."""
        self.world.finish(self)
        self._loop.end()

    def turn(self, until: float) -> None:
        """Turn its loop at `due`, and leap (`sim.leap`) before `until`."""
        if not self._heap.ready(self._loop.until):
            return
        running = self.state.lanes.alone
        if self._loop.turn() and running is not None and self.state.lanes.alone is running:
            self._runner.turned(running)
        if self._leaps:
            near, horizon = self.world.bounds(self, self.clock.now(), until)
            leap(self._loop, self._heap, self._runner, self.clock, self._passed, horizon, near)
        if self._observe is not None:
            self._observe(self.clock.now(), self.state)

    def receive(self, at: float, event: Event) -> None:
        """Schedule an event at `at`. While no worker serves requests wait, and all else is lost."""
        if not self.down:
            self._heap.schedule(at, event)
        elif isinstance(event, ArrivalEvent):
            self._waiting.append(event.submission)

    def order(
        self,
        at: float,
        id: str,
        operation: LoopCommand,
        answered: OnAnswer = lambda refused: None,
        by: str = OPERATOR,
    ) -> None:
        """Schedule a command at `at`; `answered` is called when it has ended."""
        self._on_answer[id] = answered
        self.receive(at, CommandEvent(id, operation, by))

    def borrows_over(self, source: Callable[[str], LayerSource]) -> None:
        """Set the sources, by model, through which jobs read KV on borrowed pages."""
        self._runner.borrowed = source

    @property
    def _next(self) -> str:
        return f"operation-{len(self._answers) + len(self._loop.commands.pending) + 1}"

    def _operate(self, now: float, operation: LoopCommand, by: str = OPERATOR) -> str | None:
        """Done at `now`; why not, if that is known then."""
        id = self._next
        self._heap.schedule(now, CommandEvent(id, operation, by))
        self.advance(math.nextafter(now, math.inf))
        return self._answers.get(id)

    def _answered(self, id: str, refused: str | None) -> None:
        self._answers[id] = refused
        on_answer = self._on_answer.pop(id, None)
        if on_answer is not None:
            on_answer(refused)
        m = self._leaving.pop(id, None)
        if m is not None and refused is None:
            self._left.update({what: getattr(m, what) for what in COUNTED})

    def _tell(self, outputs: list[Output]) -> None:
        for output in outputs:
            gone = isinstance(output, CancelledOutput) and output.request_id
            if not gone or (gone not in self.unsaid and gone not in self._taken):
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
