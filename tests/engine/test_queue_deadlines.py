"""Time-outs of queues, in virtual time: to the moment, and only of what was never admitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.event import FailedOutput, FinishedOutput, Output
from ballast.core.link import LinkRates
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.core.request import Request, RequestState, Submission
from ballast.engine.queue_deadlines import QueueDeadlines
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_simulate import COSTS, fleet, spec


def served(model: ModelSpec, arrivals: list[Submission]) -> dict[str, tuple[float, Output]]:
    """When and how each request ended."""
    ended: dict[str, tuple[float, Output]] = {}

    def said(now: float, output: Output) -> None:
        if isinstance(output, FailedOutput | FinishedOutput):
            assert output.request_id not in ended
            ended[output.request_id] = now, output

    profile = MachineProfile(costs={model.name: COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    simulate(fleet("balloon", [model], 400), [model], arrivals, profile, said)
    return ended


def asked(name: str, arrival: float, n: int, model: str = "m") -> Submission:
    return Submission(id=name, model=model, prompt=(1,) * 20, max_tokens=n, arrival=arrival)


def test_who_is_not_admitted_in_time_fails_at_that_moment() -> None:
    model = spec("m", max_running=1, queue_seconds=0.5)
    first = asked("first", 0.0, 400)
    ended = served(model, [first, asked("second", 0.1, 3), asked("third", 0.2, 3)])
    at, end = ended["first"]
    assert isinstance(end, FinishedOutput)
    assert at > 0.8, "it was admitted in time, and takes as long as it takes"
    for name, arrival in (("second", 0.1), ("third", 0.2)):
        at, end = ended[name]
        assert isinstance(end, FailedOutput)
        assert end.code == "queue_timeout"
        assert at == pytest.approx(arrival + 0.5)


def test_without_a_limit_requests_wait() -> None:
    ended = served(spec("m", max_running=1), [asked("a", 0.0, 400), asked("b", 0.1, 3)])
    assert all(isinstance(end, FinishedOutput) for _, end in ended.values())


def test_an_adapter_has_its_own_limit_or_its_bases() -> None:
    adapters = (
        AdapterSpec(name="patient", fingerprint="1", rank=1, queue_seconds=60.0),
        AdapterSpec(name="like its base", fingerprint="2", rank=1),
    )
    pages = spec("m").segment_bytes
    model = spec("m", max_running=1, queue_seconds=0.5, adapters=adapters)
    model = replace(model, segment_bytes=(*pages, 64, 64))
    names = ("m", "patient", "like its base")
    waiting = [asked(name, 0.1, 3, model=name) for name in names]
    ended = served(model, [asked("first", 0.0, 400), *waiting])
    found = {name: type(ended[name][1]) for name in names}
    assert found == {"m": FailedOutput, "patient": FinishedOutput, "like its base": FailedOutput}


def test_deadlines_of_those_that_left_the_queue_do_not_wake_anyone() -> None:
    requests: dict[str, Request] = {}
    patience = QueueDeadlines(requests)
    for i in range(4):
        requests[str(i)] = Request.of(asked(str(i), float(i), 3), i, spec("m"))
        patience.begin(requests[str(i)], 10.0)
    assert patience.next == 10.0
    requests["0"].to(RequestState.RUNNING)
    requests["0"].admitted_at = 3.0
    requests["0"].to(RequestState.WAITING)  # preempted
    del requests["1"]
    requests["2"] = Request.of(asked("2", 2.0, 3), 9, spec("m"))  # another by the same name
    assert patience.next == 13.0
    assert patience.over(12.9) == []
    assert patience.over(13.0) == [requests["3"]]
    assert patience.next is None
