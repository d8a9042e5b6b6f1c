"""Several devices in virtual time: each as if alone, and requests go where the policy says."""

from __future__ import annotations

from collections import Counter

import pytest

from ballast.cluster.fleet import FleetBook
from ballast.core.event import Failed, Finished, Output
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.policy.route import least_open
from ballast.sim.controller import Controller
from ballast.sim.device import Profile, SimDevice
from ballast.sim.leap import Said
from ballast.sim.simulate import simulate, simulate_devices
from tests.sim.test_simulate import COSTS, fleet, spec, submissions

NAMES = ["a", "b", "c"]
SPECS = [spec(name) for name in NAMES]
PROFILE = Profile(costs=dict.fromkeys(NAMES, COSTS), link=LinkRates.even(1e8), overhead=1e-4)


def device(settings: FleetSettings, names: list[str], said: Said) -> SimDevice:
    specs = [s for s in SPECS if s.name in names]
    return SimDevice(settings.device, specs, resolve(settings.preset), PROFILE, said)


def controller(devices: dict[str, SimDevice], book: FleetBook) -> Controller:
    return Controller(devices, book, SPECS, lambda device, spec: COSTS)


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_devices_without_common_models_run_as_if_alone(preset: str) -> None:
    settings = fleet(preset, SPECS, 100)
    arrivals = submissions(NAMES, 60, seed=3)
    told: dict[str, list[tuple[float, Output]]] = {"one": [], "two": [], "alone": []}
    devices = {
        "one": device(settings, ["a", "b"], lambda at, o: told["one"].append((at, o))),
        "two": device(settings, ["c"], lambda at, o: told["two"].append((at, o))),
    }
    homes = {"a": ["one"], "b": ["one"], "c": ["two"]}
    last = simulate_devices(controller(devices, FleetBook(homes)), arrivals)
    own = [s for s in arrivals if s.model != "c"]
    alone = simulate(settings, SPECS[:2], own, PROFILE, lambda at, o: told["alone"].append((at, o)))
    assert told["one"] == told["alone"]
    assert last >= max(at for at, _ in told["two"])
    assert alone.state.jobs == devices["one"].state.jobs


def test_replicas_share_the_requests_by_what_is_open() -> None:
    settings = fleet("balloon", SPECS, 400)
    arrivals = submissions(["a"], 120, seed=5, rate=60.0)
    ends: list[Output] = []

    def said(at: float, output: Output) -> None:
        if isinstance(output, Finished | Failed):
            ends.append(output)

    devices = {f"d{i}": device(settings, ["a"], said) for i in range(3)}
    sent: Counter[str] = Counter()
    open_then: list[tuple[int, int]] = []

    def note(submission: Submission, chosen: str) -> None:
        sent[chosen] += 1
        counts = [d.open_requests for d in devices.values()]
        open_then.append((devices[chosen].open_requests, min(counts)))

    simulate_devices(
        controller(devices, FleetBook({"a": list(devices)}, route=least_open)), arrivals, sent=note
    )
    assert len(ends) == 120
    assert all(isinstance(end, Finished) for end in ends)
    assert all(mine == least for mine, least in open_then)
    assert min(sent.values()) > 20


def run(told: list[tuple[float, str, Output]]) -> None:
    settings = fleet("balloon", SPECS, 60)

    def said_by(name: str) -> Said:
        return lambda at, output: told.append((at, name, output))

    devices = {name: device(settings, NAMES, said_by(name)) for name in ("x", "y")}
    book = FleetBook({m: ["x", "y"] for m in NAMES})
    simulate_devices(controller(devices, book), submissions(NAMES, 80, seed=9))


def test_the_same_again_is_the_same() -> None:
    runs: tuple[list[tuple[float, str, Output]], ...] = ([], [])
    for told in runs:
        run(told)
    assert runs[0] == runs[1] != []
