"""A request whose client is gone while its model loads: withdrawn at once, nothing left behind."""

from __future__ import annotations

import pytest

from ballast.core.event import CancelEvent, CancelledOutput, FinishedOutput, Output
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.view import Residency
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.sim.test_simulate import COSTS, fleet, spec


def asked(name: str, model: str, arrival: float) -> Submission:
    return Submission(
        id=name, model=model, prompt=(1,) * 20, max_tokens=5, arrival=arrival, ignore_eos=True
    )


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
@pytest.mark.parametrize("another", [False, True])
def test_a_client_that_vanishes_while_its_model_loads(preset: str, another: bool) -> None:
    models = [spec("m"), spec("n")]
    settings = fleet(preset, models, 60)
    result: list[tuple[float, Output]] = []
    # 20 pages of 64 KiB take 1.3 s.
    profile = MachineProfile(
        costs=dict.fromkeys(("m", "n"), COSTS), link=LinkRates.even(1e6), overhead=0.0
    )
    device = SimDevice(
        settings.device, models, resolve(preset), profile, lambda at, o: result.append((at, o))
    )
    device.submit(asked("gone", "m", 0.0))
    device.advance(0.5)
    assert device.state.models["m"].residency is Residency.ACTIVATING
    device._heap.schedule(0.5, CancelEvent("gone"))
    device.submit(asked("other", "m" if another else "n", 0.6))
    device.advance(0.55)
    assert result == [(0.5, CancelledOutput("gone"))]
    assert device.open_requests == 1, "the other one, which is still to come"
    if not another:
        gone, given_up = device.state.models["m"], preset != "static"
        device.advance(0.65)
        assert gone.residency is (Residency.ABSENT if given_up else Residency.ACTIVATING)
        assert device.state.pool.ledger.owned("weights:m") == (0 if given_up else 20)
        device.advance(0.6 + 1.35)  # the other one's load had the link from then on
        there = device.state.models["n"].residency is Residency.RESIDENT
        assert there == given_up
        device.advance(2.7)
        assert gone.residency is (Residency.ABSENT if given_up else Residency.RESIDENT)
        assert (gone.activations, gone.evictions) == (1, given_up)
    device.finish(1.0)
    ends = [o for _, o in result if not isinstance(o, CancelledOutput)]
    assert isinstance(ends[-1], FinishedOutput)
    device.state.pool.validate()
    for m in device.state.models.values():
        assert (list(m.waiting), list(m.running)) == ([], [])
        assert (m.job, m.life.transfer_id) == (None, None)
        m.kv.validate([])


@pytest.mark.parametrize("again", [False, True])
def test_a_load_is_kept_if_somebody_waits_for_it_when_it_lands(again: bool) -> None:
    models = [spec("m"), spec("n")]
    profile = MachineProfile(
        costs=dict.fromkeys(("m", "n"), COSTS), link=LinkRates.even(1e6), overhead=0.0
    )
    result: list[Output] = []
    device = SimDevice(
        fleet("balloon", models, 60).device,
        models,
        resolve("balloon"),
        profile,
        lambda _, output: result.append(output),
    )
    device.submit(asked("gone", "m", 0.0))
    device._heap.schedule(0.5, CancelEvent("gone"))
    if again:
        device.submit(asked("again", "m", 0.9))
    device.finish(9.0)
    m = device.state.models["m"]
    assert m.residency is (Residency.RESIDENT if again else Residency.ABSENT)
    assert m.evictions == (not again)
    assert any(isinstance(o, FinishedOutput) for o in result) == again


def test_a_model_leaves_while_its_load_is_being_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [spec("m"), spec("n")]
    profile = MachineProfile(
        costs=dict.fromkeys(("m", "n"), COSTS), link=LinkRates.even(1e6), overhead=0.0
    )
    result: list[Output] = []
    device = SimDevice(
        fleet("balloon", models, 60).device,
        models,
        resolve("balloon"),
        profile,
        lambda _, output: result.append(output),
    )
    stop, stopped = device.link.stop, list[int]()
    monkeypatch.setattr(device.link, "stop", stopped.append)
    device.submit(asked("gone", "m", 0.0))
    device._heap.schedule(0.5, CancelEvent("gone"))
    device.submit(asked("other", "n", 0.6))
    device.advance(0.61)
    assert device.state.models["m"].residency is Residency.EVICTING
    device.leave(0.61, "m", lambda why: None)
    assert "m" in device.state.models, "a piece of its load is in flight"
    stop(*stopped)
    device.finish(9.0)
    assert isinstance(result[-1], FinishedOutput)
    assert list(device.state.models) == ["n"]
    device.state.validate()
