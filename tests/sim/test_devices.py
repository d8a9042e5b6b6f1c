"""Several devices in virtual time: each as if alone, and requests go where the policy says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.core.event import FailedOutput, FinishedOutput, Output
from ballast.core.fleet import (
    DeviceCapacity,
    FleetDecision,
    FleetView,
    ModelDemand,
    Place,
    Withdraw,
)
from ballast.core.link import LinkRates
from ballast.core.order import Order
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import Replica
from ballast.policy.presets import resolve
from ballast.sim.controller import FleetStart, SimController
from ballast.sim.device import SendOutput, SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate, simulate_devices
from tests.sim.test_simulate import COSTS, fleet, spec, submissions

NAMES = ["a", "b", "c"]
SPECS = [spec(name) for name in NAMES]
HOMES = (("x", "ab"), ("y", "c"), ("z", ""))
PROFILE = MachineProfile(costs=dict.fromkeys(NAMES, COSTS), link=LinkRates.even(1e8), overhead=1e-4)


def device(settings: FleetSettings, names: list[str], said: SendOutput) -> SimDevice:
    specs = [s for s in SPECS if s.name in names]
    return SimDevice(settings.device, specs, resolve(settings.preset), PROFILE, said)


class LeastOpen(FixedPlacement):
    """Prefixes that devices hold do not matter."""

    def route(self, replicas: Sequence[Replica]) -> str:
        return min(replicas, key=lambda r: r.open_requests).device


def controller(devices: dict[str, SimDevice], book: FleetStart) -> SimController:
    return SimController(devices, book, SPECS, lambda device, spec: COSTS)


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_devices_without_common_models_run_as_if_alone(preset: str) -> None:
    settings = fleet(preset, SPECS, 100)
    arrivals = submissions(NAMES, 60, seed=3)
    outputs: dict[str, list[tuple[float, Output]]] = {"one": [], "two": [], "alone": []}
    devices = {
        "one": device(settings, ["a", "b"], lambda at, o: outputs["one"].append((at, o))),
        "two": device(settings, ["c"], lambda at, o: outputs["two"].append((at, o))),
    }
    homes = {"a": ["one"], "b": ["one"], "c": ["two"]}
    last = simulate_devices(controller(devices, FleetStart(homes)), arrivals)
    own = [s for s in arrivals if s.model != "c"]
    alone = simulate(
        settings, SPECS[:2], own, PROFILE, lambda at, o: outputs["alone"].append((at, o))
    )
    assert outputs["one"] == outputs["alone"]
    assert last >= max(at for at, _ in outputs["two"])
    assert alone.state.jobs == devices["one"].state.jobs


def test_replicas_share_the_requests_by_what_is_open() -> None:
    settings = fleet("balloon", SPECS, 400)
    arrivals = submissions(["a"], 120, seed=5, rate=60.0)
    ends: list[Output] = []

    def said(at: float, output: Output) -> None:
        if isinstance(output, FinishedOutput | FailedOutput):
            ends.append(output)

    devices = {f"d{i}": device(settings, ["a"], said) for i in range(3)}
    sent: Counter[str] = Counter()
    open_then: list[tuple[int, int]] = []

    def note(submission: Submission, chosen: str) -> None:
        sent[chosen] += 1
        counts = [d.open_requests for d in devices.values()]
        open_then.append((devices[chosen].open_requests, min(counts)))

    book = FleetStart({"a": list(devices)}, policy=LeastOpen())
    simulate_devices(controller(devices, book), arrivals, sent=note)
    assert len(ends) == 120
    assert all(isinstance(end, FinishedOutput) for end in ends)
    assert all(mine == least for mine, least in open_then)
    assert min(sent.values()) > 20


@pytest.mark.parametrize("together", [1, 3, 12, 31])
@pytest.mark.parametrize("ahead", [0, 1])
def test_arrivals_of_one_moment_go_to_different_replicas(together: int, ahead: int) -> None:
    """As in traces whose stamps are whole seconds, or seconds apart."""
    names, settings = ["d0", "d1", "d2"], fleet("balloon", SPECS, 400)
    profile = replace(PROFILE, ahead=ahead)
    devices = {
        name: SimDevice(
            settings.device, SPECS[:1], resolve(settings.preset), profile, lambda at, o: None
        )
        for name in names
    }
    drawn = submissions(["a"], 4 * together, seed=7)
    arrivals = [replace(s, arrival=3.0 * (n // together)) for n, s in enumerate(drawn)]
    sent: dict[float, Counter[str]] = {}

    def note(submission: Submission, chosen: str) -> None:
        sent.setdefault(submission.arrival, Counter())[chosen] += 1

    book = FleetStart({"a": names})
    simulate_devices(controller(devices, book), arrivals, sent=note)
    for counts in sent.values():
        assert max(counts[d] for d in names) - min(counts[d] for d in names) <= 1
    assert all(d.open_requests == 0 for d in devices.values())


def test_what_all_prompts_begin_with_does_not_gather_them_on_one_replica() -> None:
    names, settings = ["d0", "d1", "d2"], fleet("balloon", SPECS, 400)
    devices = {name: device(settings, ["a"], lambda at, o: None) for name in names}
    common = tuple(range(1, 33))
    arrivals = [
        replace(s, prompt=(*common, *(1 + (7 * n + k) % 400 for k in range(200))), arrival=n // 9)
        for n, s in enumerate(submissions(["a"], 45, seed=7))
    ]
    sent: dict[float, Counter[str]] = {}

    def note(submission: Submission, chosen: str) -> None:
        sent.setdefault(submission.arrival, Counter())[chosen] += 1

    simulate_devices(controller(devices, FleetStart({"a": names})), arrivals, sent=note)
    assert all(sorted(counts.values()) == [3, 3, 3] for counts in sent.values())


def run(outputs: list[tuple[float, str, Output]]) -> None:
    settings = fleet("balloon", SPECS, 60)

    def said_by(name: str) -> SendOutput:
        return lambda at, output: outputs.append((at, name, output))

    devices = {name: device(settings, NAMES, said_by(name)) for name in ("x", "y")}
    book = FleetStart({m: ["x", "y"] for m in NAMES})
    simulate_devices(controller(devices, book), submissions(NAMES, 80, seed=9))


def test_the_same_again_is_the_same() -> None:
    runs: tuple[list[tuple[float, str, Output]], ...] = ([], [])
    for outputs in runs:
        run(outputs)
    assert runs[0] == runs[1] != []


class Restless(FleetPolicy):
    """Moves models about without any reason; some of what it wants cannot be done."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    @property
    def moves(self) -> bool:
        return True

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        kinds = (Place, Withdraw)
        wanted = tuple(
            self._random.choice(kinds)(self._random.choice(NAMES), self._random.choice("xyz"))
            for _ in range(self._random.randrange(4))
        )
        return FleetDecision(wanted, None, view.now + 0.2)


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_models_may_move_at_any_time(preset: str) -> None:
    done: Counter[str] = Counter()
    for seed in range(4):
        done += moved_about(preset, seed)
    assert min(done.values()) > 10, done
    assert set(done) == {"Place", "Withdraw", "refused"}


def moved_about(preset: str, seed: int) -> Counter[str]:
    """What was done, and how often it could not be."""
    settings = fleet(preset, SPECS, 100)
    ends: list[tuple[str, Output]] = []
    where: dict[str, str] = {}

    def said_by(name: str) -> SendOutput:
        def said(at: float, output: Output) -> None:
            if isinstance(output, FinishedOutput | FailedOutput):
                ends.append((name, output))

        return said

    devices = {name: device(settings, list(on), said_by(name)) for name, on in HOMES}
    moved: list[str] = []

    def on_move(at: float, action: Order, refused: str | None) -> None:
        moved.append("refused" if refused else type(action).__name__)

    book = FleetStart(
        {m: [name for name, on in HOMES if m in on] for m in NAMES},
        [ModelDemand(m, 1, 1) for m in NAMES],
        [DeviceCapacity(name, 1) for name in devices],
        Restless(seed),
    )
    arrivals = submissions(NAMES, 100, seed=seed)

    def sent(submission: Submission, name: str) -> None:
        where[submission.id] = name

    there = SimController(devices, book, SPECS, lambda device, spec: COSTS, on_move)
    simulate_devices(there, arrivals, sent)
    assert {o.request_id: name for name, o in ends} == where
    assert len(ends) == len(arrivals) == len(where)
    if preset == "balloon":  # the others may have no place for a model
        assert all(isinstance(o, FinishedOutput) for _, o in ends)
    for model, homes in there.homes().items():
        assert homes
        assert all(model in devices[name].state.models for name in homes)
    for simulated in devices.values():
        simulated.state.pool.validate()
    assert sum(d.did("activations") for d in devices.values()) >= len(NAMES)
    return Counter(moved)
