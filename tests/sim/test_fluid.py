"""The graph of links: bytes are conserved, no link is exceeded, shares are max-min fair."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.link import LinkRates
from ballast.sim.change_queue import ChangeQueue
from ballast.sim.fluid import Ceiling, Fluid, Side, Wire, max_min

EPS = 1e-9
rates = st.sampled_from([1.0, 7.0, 10.0, 64.0, 1e3]) | st.floats(0.5, 2e3)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[float], list[float]]:
    """Paths, capacities, ceilings."""
    capacities = draw(st.lists(rates, min_size=1, max_size=6))
    links = st.integers(0, len(capacities) - 1)
    paths = draw(st.lists(st.lists(links, min_size=1, max_size=4, unique=True), max_size=8))
    ceilings = [draw(st.just(inf) | rates) for _ in paths]
    return paths, capacities, ceilings


@given(graphs())
def test_rates_are_max_min_fair(graph: tuple[list[list[int]], list[float], list[float]]) -> None:
    """Nobody can have more without taking from a flow that has no more than it (Bertsekas and
    Gallager: each flow is at its ceiling, or has a full link on which no other is faster)."""
    paths, capacities, ceilings = graph
    check_fair(paths, capacities, ceilings, [1.0] * len(paths))


@given(graphs(), st.data())
def test_weighted_rates_are_max_min_fair_over_their_weights(
    graph: tuple[list[list[int]], list[float], list[float]], data: st.DataObject
) -> None:
    paths, capacities, ceilings = graph
    check_fair(paths, capacities, ceilings, [data.draw(st.floats(0.01, 10.0)) for _ in paths])


def check_fair(
    paths: list[list[int]], capacities: list[float], ceilings: list[float], weights: list[float]
) -> None:
    found = max_min(paths, capacities, ceilings, weights)
    carried = [0.0] * len(capacities)
    for path, rate in zip(paths, found, strict=True):
        assert rate > 0
        for link in path:
            carried[link] += rate
    for link, capacity in enumerate(capacities):
        assert carried[link] <= capacity * (1 + EPS)
    for path, rate, ceiling, weight in zip(paths, found, ceilings, weights, strict=True):
        assert rate <= ceiling
        if rate < ceiling:
            assert any(
                carried[link] >= capacities[link] * (1 - EPS)
                and all(
                    other / of <= rate / weight * (1 + EPS)
                    for crossing, other, of in zip(paths, found, weights, strict=True)
                    if link in crossing
                )
                for link in path
            ), "it has no bottleneck"


@dataclass(frozen=True)
class Sent:
    at: float
    n_bytes: int
    path: tuple[tuple[int, bool], ...]
    """Wires, each downwards or not."""
    ceiling: float | None


sent = st.builds(
    Sent,
    at=st.floats(0, 5) | st.just(1.0),
    n_bytes=st.integers(0, 2000) | st.just(100),
    path=st.lists(
        st.tuples(st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=3,
        unique_by=lambda h: h[0],
    ).map(tuple),
    ceiling=st.none() | st.sampled_from([3.0, 40.0]),
)
WIRES = (
    LinkRates(100.0, 80.0, 60.0, 50.0),
    LinkRates.even(100.0),
    LinkRates.even(30.0, 60.0),
    LinkRates(1000.0, 10.0, 999.0, 9.0),
)


@given(st.lists(sent, min_size=1, max_size=10))
def test_bytes_are_conserved_and_no_link_is_exceeded(asked: list[Sent]) -> None:
    """Between any two moments at which something begins or ends, rates are constant: what they
    carry adds up to what was asked, and every side is within its capacity."""
    agenda = ChangeQueue()
    fluid = Fluid(agenda)
    wires = [Wire(r) for r in WIRES]
    delivered = [0.0] * len(asked)
    ends: dict[int, tuple[float, float]] = {}
    now = 0.0

    def pass_time(until: float) -> None:
        nonlocal now
        carried: dict[Side, float] = {}
        for flow in fluid.flows:
            i = numbers[id(flow.ended)]
            delivered[i] += (until - now) * flow.rate
            for side in flow.path:
                carried[side] = carried.get(side, 0.0) + flow.rate
        for side, rate in carried.items():
            assert rate <= side.capacity * (1 + EPS)
        now = until

    def run(until: float) -> None:
        while agenda.next <= until and agenda.next < inf:
            pass_time(agenda.next)
            agenda.run(agenda.next)
        pass_time(min(until, 1e9))

    numbers: dict[int, int] = {}
    keep = []
    for i, one in sorted(enumerate(asked), key=lambda pair: pair[1].at):

        def ended(at: float, seconds: float, i: int = i) -> None:
            ends[i] = at, seconds

        keep.append(ended)
        numbers[id(ended)] = i
        run(one.at)
        path = [wires[w].down if down else wires[w].up for w, down in one.path]
        ceiling = None if one.ceiling is None else Ceiling(one.ceiling, one.ceiling)
        fluid.start(one.at, path, one.n_bytes, ended, ceiling)
    run(inf)
    assert sorted(ends) == list(range(len(asked)))
    for i, one in enumerate(asked):
        assert delivered[i] == pytest.approx(one.n_bytes, rel=1e-9, abs=1e-6)
        alone = one.ceiling or inf
        for w, down in one.path:
            alone = min(alone, wires[w].rates.to_device if down else wires[w].rates.to_host)
        at, seconds = ends[i]
        assert seconds >= one.n_bytes / alone * (1 - EPS)
        assert at == pytest.approx(one.at + seconds)


@given(st.floats(0, 100), st.integers(0, 10**12), rates)
def test_a_flow_alone_takes_its_bytes_over_its_rate_to_the_last_bit(
    at: float, n_bytes: int, rate: float
) -> None:
    agenda = ChangeQueue()
    ends: list[tuple[float, float]] = []
    wire = Wire(LinkRates.even(rate))
    Fluid(agenda).start(at, [wire.down], n_bytes, lambda *end: ends.append(end))
    agenda.run(inf)
    end = at + n_bytes / rate
    assert ends == [(end, end - at)]


def test_what_a_full_host_link_leaves_goes_to_those_that_can_use_it() -> None:
    """Three devices of 10, 40 and 100 on a host of 90: 10, 40 and the other 40 for 400 bytes each;
    after 10 s the last two are done, and the first goes on at 10."""
    agenda = ChangeQueue()
    fluid = Fluid(agenda)
    host = Wire(LinkRates.even(90.0))
    ends: dict[str, float] = {}
    for name, rate in {"slow": 10.0, "middle": 40.0, "fast": 100.0}.items():
        own = Wire(LinkRates.even(rate))

        def ended(at: float, seconds: float, name: str = name) -> None:
            ends[name] = at

        fluid.start(0.0, [own.down, host.down], 400, ended)
    agenda.run(inf)
    assert ends == {"middle": 10.0, "fast": 10.0, "slow": 40.0}


@pytest.mark.parametrize(
    ("reserved", "parts"),
    [
        ((0.6, 0.0, 0.0), (0.6, 0.2, 0.2)),
        ((0.5, 0.25, 0.0), (0.5, 0.25, 0.25)),
        ((0.6, 0.4, 0.0), (0.594, 0.396, 0.01)),
        ((1.0, 0.5, 0.0), (4 / 9, 2 / 9, 3 / 9)),
        ((0.2, 0.1, 0.1), (0.5, 0.25, 0.25)),
        ((0.0, 0.0, 0.0), (1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_reservations_divide_a_link_as_live_ones_do(
    reserved: tuple[float, ...], parts: tuple[float, ...]
) -> None:
    """The cases of `tests/memory/test_shared_pace.py`."""
    agenda = ChangeQueue()
    fluid, wire = Fluid(agenda), Wire(LinkRates.even(100.0))
    for part in reserved:
        fluid.start(0.0, [wire.down], 1000, lambda at, seconds: None, reserved=100.0 * part)
    assert [flow.rate for flow in fluid.flows] == pytest.approx([100 * p for p in parts], abs=0.1)
