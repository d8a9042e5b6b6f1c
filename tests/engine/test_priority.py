"""Priority decides who waits and who is undone when not all can be served at once."""

from __future__ import annotations

import pytest

from ballast.core.event import FinishedOutput, Output
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_simulate import COSTS, fleet, spec


def asked(name: str, arrival: float, priority: int = 0, n: int = 30) -> Submission:
    return Submission(
        id=name,
        model="m",
        prompt=(1,) * 20,
        max_tokens=n,
        arrival=arrival,
        priority=priority,
        ignore_eos=True,
    )


def ends(
    model: ModelSpec, pages: int, arrivals: list[Submission], preset: str = "balloon"
) -> list[FinishedOutput]:
    """The requests' ends, as they came."""
    result: list[Output] = []
    profile = MachineProfile(costs={model.name: COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    simulate(
        fleet(preset, [model], pages), [model], arrivals, profile, lambda _, o: result.append(o)
    )
    return [o for o in result if isinstance(o, FinishedOutput)]


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_the_more_important_leaves_the_queue_first(preset: str) -> None:
    first = asked("first", 0.0, n=100)
    waiting = [asked("a", 0.11), asked("b", 0.12, -1), asked("c", 0.13, 5), asked("d", 0.14, 5)]
    ended = ends(spec("m", max_running=1), 400, [first, *waiting], preset)
    assert [e.request_id for e in ended] == ["first", "c", "d", "a", "b"]


def test_the_less_important_gives_way_when_memory_is_short() -> None:
    model = spec("m")
    low, high = asked("low", 0.0, 0, n=150), asked("high", 0.01, 1, n=150)
    pages = next(n for n in range(10, 400) if ends(model, n, [low]))
    ended = {e.request_id: e for e in ends(model, pages, [low, high])}
    assert (ended["low"].preemptions > 0, ended["high"].preemptions) == (True, 0)
    assert list(ended) == ["high", "low"]
