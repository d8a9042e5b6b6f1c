"""Whatever happens to a device, snapshots of its models are never stale, and its books agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ballast.core.actions import (
    Action,
    ActivateCommand,
    Change,
    Compact,
    Decision,
    DropCache,
    EvictCommand,
    Hold,
    Limit,
    LoopCommand,
    Preempt,
    Reside,
    Stage,
)
from ballast.core.event import CancelEvent, CommandEvent, Event, Output, PauseEvent, ResumeEvent
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.settings import Slo
from ballast.core.view import DeviceView
from ballast.engine.life_rules import Membership
from ballast.engine.state import DeviceState
from ballast.policy.base import MemoryPolicy
from ballast.policy.presets import Preset, resolve
from ballast.policy.requirements import Requirements
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.engine.counted import count
from tests.engine.fresh import check_views
from tests.policy.worlds import PAGE
from tests.sim.test_simulate import COSTS, fleet, spec

PARTS = {"a": "ehhhhh", "b": "ehhhhg", "c": "dijklm"}
"""By model, the contents of its segments: embeddings, and five layers."""
LATER = "later"
SHARED_PREFIX = tuple(range(1, 129))
ROTATIONS = (WHOLE, Rotation((0, 1), 1), Rotation((0, 2, 4), 1), Rotation((1, 2, 3, 4), 2))
COUNTED: Counter[str] = Counter()
"""Methods that have changed what snapshots show."""
picks = st.integers(0, 1000)


def contents(name: str, parts: str) -> ModelSpec:
    """Layers of one size. No two segments of a model are alike."""
    return spec(
        name,
        n_layers=5,
        max_running=3,
        segment_bytes=(3 * PAGE, *(2 * PAGE,) * 5),
        segment_digests=tuple(f"{part}{i}" * 32 for i, part in enumerate(parts)),
    )


@dataclass
class Scripted(MemoryPolicy):
    """`policy`, and after its actions those that a test has put into `script`."""

    policy: MemoryPolicy
    script: list[Action] = field(default_factory=list)

    @property
    def requires(self) -> Requirements:
        return self.policy.requires

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = self.policy(view, memo)
        script = tuple(self.script)
        self.script.clear()
        return replace(decision, actions=(*decision.actions, *script), wake_at=view.now + 0.004)


class Device(RuleBasedStateMachine):
    """A device in virtual time on which anything may happen at any time."""

    @initialize(
        preset=st.sampled_from(["static", "balloon", "swap", "kvswap"]),
        pages=st.sampled_from([40, 60, 110]),
        lanes=st.sampled_from([1, 2]),
    )
    def begin(self, preset: str, pages: int, lanes: int) -> None:
        self.patch = pytest.MonkeyPatch()
        count(self.patch, COUNTED)
        specs = [contents(name, parts) for name, parts in PARTS.items()]
        resolved = resolve(preset)
        self.policy = Scripted(resolved.memory)
        lanes = 1 if preset == "swap" else lanes
        made = fleet(preset, specs, pages + 60 * (lanes - 1), lanes=lanes)
        self.device = SimDevice(
            made.device,
            specs,
            Preset("scripted", self.policy, resolved.compute, resolved.order),
            MachineProfile(
                costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
            ),
            lambda now, output: self.hear(output),
            observe=lambda now, state: self.look(state),
        )
        self.state = self.device.state
        self.n = 0

    def hear(self, output: Output) -> None:
        pass

    def look(self, state: DeviceState) -> None:
        state.validate()
        check_views(state)

    # -- what clients and operators do ----------------------------------------------------------

    @rule(pick=picks, n=st.integers(1, 6), prompt=st.integers(1, 150), tokens=st.integers(0, 60))
    def arrive(self, pick: int, n: int, prompt: int, tokens: int) -> None:
        for i in range(n):
            self.n += 1
            prefix = SHARED_PREFIX[: 16 * (pick % 9)]
            self.device.submit(
                Submission(
                    id=f"r{self.n}",
                    model=self.named(pick + i % 2),
                    prompt=(*prefix, *(self.n % 500 + 1,) * prompt),
                    max_tokens=tokens + 3 * i,
                    arrival=self.device.clock.now(),
                    ignore_eos=True,
                    prompt_logprobs=0 if pick % 5 == 0 else None,
                )
            )
        self.go_on(0.03)

    @precondition(lambda self: self.state.requests)
    @rule(pick=picks, kind=st.sampled_from([CancelEvent, PauseEvent, ResumeEvent, ResumeEvent]))
    def interrupt(self, pick: int, kind: type[CancelEvent | PauseEvent | ResumeEvent]) -> None:
        ids = list(self.state.requests)
        self.happens(kind(ids[pick % len(ids)]))

    @rule(pick=picks, kind=st.sampled_from([ActivateCommand, EvictCommand]))
    def order(self, pick: int, kind: type[ActivateCommand | EvictCommand]) -> None:
        self.ask(kind(self.named(pick), "an operator"))

    @rule(pick=picks, pinned=st.booleans())
    def change(self, pick: int, pinned: bool) -> None:
        s = self.state.models[self.named(pick)].spec
        self.ask(
            Change(
                model=s.name,
                slo=Slo(ttft=2.0, tpot=0.2),
                priority=pick % 3,
                share=s.share,
                max_running=1 + pick % 4,
                max_waiting=s.max_waiting,
                queue_seconds=None,
                pinned=pinned and pick % 4 == 0,
                ttl=0.05 if pick % 2 else None,
            )
        )

    @precondition(lambda self: LATER not in self.state.models)
    @rule(pick=picks)
    def join(self, pick: int) -> None:
        now = self.device.clock.now()
        self.device.join(now, contents(LATER, ("ehhhhg", "dnnnnn")[pick % 2]), COSTS)

    @precondition(lambda self: LATER in self.state.named)
    @rule()
    def leave(self) -> None:
        self.device.leave(self.device.clock.now(), LATER, lambda why: None)

    # -- what the policy does -------------------------------------------------------------------

    @rule(pick=picks, frozen=st.booleans())
    def hold(self, pick: int, frozen: bool) -> None:
        name = self.model(pick)
        self.policy.script.append(Hold(name, True, "at random", frozen))
        self.go_on(0.03)
        if name in self.state.models:
            self.policy.script.append(Hold(name, False, "at random"))

    @rule(pick=picks, pages=st.sampled_from([None, None, 4, 20]))
    def limit(self, pick: int, pages: int | None) -> None:
        self.policy.script.append(Limit(self.model(pick), pages, "at random"))

    @rule(pick=picks, pages=st.integers(1, 8), kind=st.sampled_from([DropCache, Compact]))
    def free(self, pick: int, pages: int, kind: type[DropCache | Compact]) -> None:
        self.policy.script.append(kind(self.model(pick), pages, "at random"))

    @rule(pick=picks, comes=st.booleans())
    def move(self, pick: int, comes: bool) -> None:
        name = self.model(pick)
        plan = self.state.models[name].plan
        self.policy.script.append(Reside(name, plan.whole() if comes else plan.without(None)))

    @precondition(lambda self: self.state.requests)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        requests = list(self.state.requests.values())
        r = requests[pick % len(requests)]
        self.policy.script.append(Preempt(r.model, r.id, "at random"))

    @rule(pick=picks, rotation=st.sampled_from(ROTATIONS))
    def turn(self, pick: int, rotation: Rotation) -> None:
        name = ("c", self.model(pick))[pick % 2]
        whole = self.state.models[name].plan.whole()
        for plan in (whole, whole.turned(rotation)):
            self.policy.script.append(Reside(name, plan, "at random"))
        self.policy.script.append(Stage(name, pick % 7, "at random"))

    @rule(seconds=st.sampled_from([0.003, 0.01, 0.03, 0.1]))
    def go_on(self, seconds: float) -> None:
        self.device.advance(self.device.clock.now() + seconds)

    def teardown(self) -> None:
        try:
            if hasattr(self, "state"):
                self.state.validate()
                check_views(self.state)
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    # -- inside ---------------------------------------------------------------------------------

    def model(self, pick: int) -> str:
        return list(self.state.models)[pick % len(self.state.models)]

    def named(self, pick: int) -> str:
        served = [
            m.spec.name for m in self.state.models.values() if m.life.stay is Membership.SERVED
        ]
        return served[pick % len(served)]

    def ask(self, operation: LoopCommand) -> None:
        self.n += 1
        self.happens(CommandEvent(f"order-{self.n}", operation))

    def happens(self, event: Event) -> None:
        self.device._heap.schedule(self.device.clock.now(), event)
        self.go_on(0.01)


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=4, stateful_step_count=40, deadline=None)
