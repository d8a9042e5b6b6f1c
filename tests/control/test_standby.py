"""When devices on standby serve, and when they leave again."""

from __future__ import annotations

import pytest

from ballast.control.standby import (
    LEAVE_SECONDS,
    WANT_SECONDS,
    BeginServing,
    EndServing,
    Standby,
    Utilisation,
)

LATE, BUSY, IDLE = Utilisation(1, 1.0), Utilisation(0, 0.9), Utilisation(0, 0.1)


def looks(machine: Standby, begin: float, end: float, **serving: Utilisation) -> list[object]:
    """What it decides in looks a second apart."""
    found, now = [], begin
    while now < end:
        found.append(machine.look(now, serving))
        now += 1.0
    return [decided for decided in found if decided is not None]


def test_a_device_comes_once_requests_have_been_late_for_some_time() -> None:
    machine = Standby(["b", "c"])
    assert looks(machine, 0.0, WANT_SECONDS, a=LATE) == []
    assert machine.look(WANT_SECONDS, {"a": BUSY}) is None, "none is late any more"
    now = WANT_SECONDS + 1
    assert looks(machine, now, now + WANT_SECONDS + 1, a=LATE) == [BeginServing("b")]
    assert looks(machine, 100.0, 200.0, a=LATE) == [], "it has no host yet"
    assert looks(machine, 200.0, 220.0, a=LATE, b=BUSY) == [BeginServing("c")]
    assert looks(machine, 220.0, 300.0, a=LATE, b=LATE, c=LATE) == [], "there is no other"


def serving_two() -> Standby:
    machine = Standby(["b", "c"])
    assert looks(machine, 0.0, WANT_SECONDS + 1, a=LATE) == [BeginServing("b")]
    return machine


def test_the_last_leaves_where_the_others_are_enough() -> None:
    machine = serving_two()
    assert looks(machine, 20.0, 1000.0, a=BUSY, b=IDLE) == [], "together too much for one"
    assert looks(machine, 1000.0, 1000.0 + LEAVE_SECONDS, a=IDLE, b=IDLE) == []
    assert machine.look(1000.0 + LEAVE_SECONDS, {"a": IDLE, "b": IDLE}) == EndServing("b")
    assert looks(machine, 2000.0, 3000.0, a=IDLE, b=IDLE) == [], "it is being emptied"
    machine.ended(empty=True)
    assert looks(machine, 3000.0, 4000.0, a=IDLE) == [], "a stays"
    assert looks(machine, 4000.0, 4020.0, a=LATE) == [BeginServing("b")]


@pytest.mark.parametrize("empty", [False, True])
def test_one_that_cannot_be_emptied_serves_on(empty: bool) -> None:
    machine = serving_two()
    assert looks(machine, 20.0, 21.0 + LEAVE_SECONDS, a=IDLE, b=IDLE) == [EndServing("b")]
    machine.ended(empty=empty)
    late = looks(machine, 500.0, 520.0, a=LATE, b=LATE)
    assert late == [BeginServing("b" if empty else "c")]


def test_a_host_that_does_not_come_is_not_waited_for_when_load_has_gone() -> None:
    machine = serving_two()
    assert looks(machine, 20.0, 21.0 + LEAVE_SECONDS, a=IDLE) == [EndServing("b")]
