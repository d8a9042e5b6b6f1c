"""A model's life: every state that a device can bring it to, and every transition from there."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ballast.core.errors import BrokenPromise
from ballast.core.job import Job
from ballast.core.rotation import Rotation
from ballast.core.view import Residency
from ballast.engine.life import Life
from ballast.engine.life_rules import (
    RULES,
    EarlyStart,
    Membership,
    RemapPhase,
    Step,
    Transition,
    Work,
)

PARTS: dict[str, type[enum.Enum]] = {
    "residency": Residency,
    "early_start": EarlyStart,
    "work": Work,
    "layers": RemapPhase,
    "stay": Membership,
}
LAYERS = Rotation((0, 1), 1)
JOB = Job(1, 0, "m", ())

DO: dict[Transition, Callable[[Life], object]] = {
    Transition.ACTIVATE: lambda m: m.activate(1),
    Transition.ACTIVATE_SHARED: lambda m: m.activate_shared(0.0),
    Transition.REFILL: lambda m: m.refill(2),
    Transition.OPEN: lambda m: m.open(),
    Transition.LAND: lambda m: m.land(0.0),
    Transition.BREAK: lambda m: m.break_off("the host is gone"),
    Transition.FAIL: lambda m: m.fail(),
    Transition.STOP_LOAD: lambda m: m.stop_load(),
    Transition.LOAD_STOPPED: lambda m: m.load_stopped(),
    Transition.ORDER_EVICTION: lambda m: m.order_eviction(),
    Transition.EVICT: lambda m: m.evict(),
    Transition.BEGIN_JOB: lambda m: m.begin_job(JOB, 0.0),
    Transition.BEGIN_EARLY_JOB: lambda m: m.begin_early_job(JOB, 0.0),
    Transition.END_JOB: lambda m: m.end_job(),
    Transition.ORDER_REMAP: lambda m: m.order_remap(LAYERS),
    Transition.SETTLE: lambda m: m.settle(),
    Transition.SETTLED: lambda m: m.settled(),
    Transition.LEAVE: lambda m: m.leave(),
    Transition.REMOVE: lambda m: m.remove(),
}


def parts(life: Life) -> dict[str, enum.Enum]:
    return {name: getattr(life, name) for name in PARTS}


def data(life: Life) -> tuple[object, ...]:
    return life.transfer_id, life.load_failed, life.job, life.remap_to, life.version.n


@dataclass
class Driven:
    """A model on a device that does what `ballast.engine` does, and no more."""

    life: Life
    stirred: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return *parts(self.life).values(), self.stirred, self.life.stopping

    def proceed(self) -> None:
        step = self.life.due(stirred=self.stirred)
        if step is Step.EVICT:
            self.evict()
        elif step is Step.SETTLE:
            self.life.settle()
        elif step is Step.FAIL:
            self.life.fail()

    def evict(self) -> None:
        self.life.evict()
        self.stirred = False

    def events(self) -> Iterator[Callable[[Driven], None]]:
        """What may happen next, events and actions alike."""
        life = self.life
        here = life.stay is not Membership.GONE
        resident = life.residency is Residency.RESIDENT and here
        if life.residency is Residency.ABSENT and here:
            yield lambda d: d.life.activate(1)
            yield lambda d: d.life.activate_shared(0.0)
        if life.stopping:
            yield Driven.load_stopped
        elif life.transfer_id is not None:
            if life.work is Work.IDLE and here:
                yield lambda d: d.life.stop_load()
            yield lambda d: d.life.land(0.0)
            if life.early_start is EarlyStart.NONE:
                yield lambda d: d.life.refill(2)
                yield lambda d: d.life.open()
            if life.work is Work.BUSY:
                yield lambda d: d.life.break_off("the host is gone")
            else:
                yield lambda d: d.life.fail()
            if life.ready and here:
                yield lambda d: d.life.begin_early_job(JOB, 0.0)
        if resident:
            yield Driven.request_eviction
            yield Driven.remap
            if life.work is Work.IDLE and not life.settling:
                yield lambda d: d.life.begin_job(JOB, 0.0)
        if life.work is Work.BUSY:
            for passed in (False, True):
                yield lambda d, passed=passed: d.end(passed)  # type: ignore[misc]
        if life.settling:
            yield Driven.settled
        if life.stay is Membership.SERVED:
            yield lambda d: d.life.leave()
        waits = life.awaited or life.work is Work.BUSY or self.stirred
        if life.stay is Membership.LEAVING and not waits:
            yield lambda d: d.life.remove()

    def request_eviction(self) -> None:
        self.life.order_eviction()
        self.proceed()

    def load_stopped(self) -> None:
        self.life.load_stopped()
        self.proceed()

    def remap(self) -> None:
        self.life.order_remap(LAYERS)
        self.proceed()

    def end(self, passed: bool) -> None:
        self.life.end_job()
        if passed:
            self.stirred = False
        self.proceed()

    def settled(self) -> None:
        wanted = self.life.settled()
        if self.life.residency is Residency.EVICTING:
            self.evict()
        elif wanted is not None:
            self.stirred = True


def test_every_state_that_can_be_reached_is_whole_and_nothing_else_is_let_by() -> None:
    first = Driven(Life("m"))
    known, left = {first.key}, [first]
    seen: set[enum.Enum] = set()
    legal: set[Transition] = set()
    while left:
        driven = left.pop()
        driven.life.validate()
        seen |= set(parts(driven.life).values())
        for transition in Transition:
            legal |= {transition} if tried(driven.life, transition) else set()
        for event in driven.events():
            after = copy.copy(driven)
            after.life = copy.copy(driven.life)
            before = driven.life.version.n
            event(after)
            assert after.life.version.n > before
            if after.key not in known:
                known.add(after.key)
                left.append(after)
    assert seen == {state for part in PARTS.values() for state in part}
    assert legal == set(Transition)
    assert len(known) == 50


def tried(life: Life, transition: Transition) -> bool:
    """Whether a transition is legal: it does what its rule says, or it is refused."""
    rule = RULES[transition]
    moves = {name: of for name in PARTS if (of := getattr(rule, name)) is not None}
    before, kept = parts(life), data(life)
    wrong = [name for name, of in moves.items() if before[name] not in of]
    after = copy.copy(life)
    if wrong:
        with pytest.raises(BrokenPromise) as refused:
            DO[transition](after)
        assert (parts(after), data(after)) == (before, kept)
        legal = next(iter(moves[wrong[0]].items()))
        text = str(refused.value)
        assert f"its {wrong[0]} is {before[wrong[0]].value};" in text
        assert f"{legal[0].value} -> {legal[1].value}" in text
        return False
    DO[transition](after)
    assert parts(after) == {
        name: moves[name][now] if name in moves else now for name, now in before.items()
    }
    return True


def test_a_state_that_no_event_leads_to_is_found() -> None:
    spoilt: Callable[[Life], object]
    for spoilt in (
        lambda m: m.begin_job(JOB, 0.0) or m.order_eviction() or m.end_job(),
        lambda m: m.begin_job(JOB, 0.0) or m.order_remap(LAYERS) or m.end_job(),
    ):
        life = Life("m")
        life.activate_shared(0.0)
        life.validate()
        spoilt(life)
        with pytest.raises(BrokenPromise, match="m \\(residency"):
            life.validate()
    life = Life("m")
    life.activate(1)
    life.open()
    life.begin_early_job(JOB, 0.0)
    life.break_off("the host is gone")
    life.end_job()
    with pytest.raises(BrokenPromise, match="a failure that nothing is in the way of"):
        life.validate()
