"""When first jobs begin: with as much of the weights to come as comes in while they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.event import ArrivalEvent
from ballast.core.job import JobLoad, chunk_pairs
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.engine.events import handle
from ballast.engine.head_start import bytes_ahead
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.engine.orders import activate
from tests.sim.test_early import RATE, layered
from tests.sim.test_simulate import COSTS, fleet


@pytest.fixture
def device() -> SimDevice:
    one = replace(layered("m"), max_running=3)
    profile = MachineProfile(
        costs={"m": COSTS}, link=LinkRates.even(RATE), overhead=0.0, early=True
    )
    settings = fleet("balloon", [one], 200)
    return SimDevice(settings.device, [one], resolve("balloon"), profile, lambda now, output: None)


def ask(device: SimDevice, *tokens: int) -> None:
    for i, n in enumerate(tokens):
        one = Submission(id=f"{n}-{i}", model="m", prompt=(1,) * n, max_tokens=2)
        assert handle(device.state, ArrivalEvent(one)) == []


@pytest.mark.parametrize(
    ("prompts", "chunks"),
    [
        ([20], [20]),
        ([20, 100, 50], [20, 100, 8]),  # as many tokens as a job may have
        ([5, 5, 5, 5], [5, 5, 5]),  # as many requests as may run
        ([300], [128]),
    ],
)
def test_as_much_as_comes_in_while_the_first_job_runs(
    device: SimDevice, prompts: list[int], chunks: list[int]
) -> None:
    ask(device, *prompts)
    pairs = sum(chunk_pairs(n, 0) for n in chunks)
    load = JobLoad(sum(chunks), len(chunks), pairs, 0, 0)
    m = device.state.models["m"]
    assert bytes_ahead(device.state, m) == int(COSTS.of(load) * RATE)


def test_at_the_rate_that_activations_had(device: SimDevice) -> None:
    ask(device, 20)
    m = device.state.models["m"]
    before = bytes_ahead(device.state, m)
    device.state.activation_rate.begin(1, 0.0)
    device.state.activation_rate.end(1, int(RATE), 2.0, failed=False)
    assert bytes_ahead(device.state, m) == pytest.approx(before / 2, abs=1)


def test_nobody_waits_for_what_an_operator_brings(device: SimDevice) -> None:
    m = device.state.models["m"]
    assert bytes_ahead(device.state, m) == 0
    assert activate(device.state, "m") is None
    assert not device._streams.loads["m"].n
    assert device._streams.of("m") is None
