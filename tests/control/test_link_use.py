"""Live devices whose models read weights over one shared link, as the fleet policy sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ballast.control.device_record import DeviceRecord
from ballast.control.request_router import RequestRouter
from ballast.control.routed_devices import RoutedDevices
from ballast.control.suspicion import Suspicions
from ballast.core.command import CommandOutcome, DeviceCommand
from ballast.core.cost import StepCosts
from ballast.core.model import ModelSpec
from ballast.core.pass_traffic import PassSizes, decode_bytes, pass_traffic
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, Slo
from ballast.core.units import MiB
from ballast.policy.presets import preset_of
from ballast.sim.model_catalogue import facts
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lifecycle_messages import ReadyMsg
from benchmarks.fault_world import Client, VirtualTimers
from tests.control.test_fleet_view import MODEL
from tests.policy.worlds import spec

MODELS = {name: replace(spec(name), slo=Slo(ttft=2.0, tpot=0.1)) for name in "abc"}
NEED = decode_bytes(MODELS["a"]) / 0.1
"""Bytes per second of the link that each of them needs."""


class Device(DeviceRecord):
    """A device whose worker takes everything and answers nothing."""

    def tell(self, message: ToWorker) -> None: ...

    def order(self, command: DeviceCommand, answered: Callable[[CommandOutcome], object]) -> None:
        raise NotImplementedError

    def kill(self, why: str) -> None: ...

    def _began(self, request_id: str) -> None: ...


def devices(n: int, link: LinkSettings, preset: str = "c2cserve") -> RoutedDevices[Device]:
    found: RoutedDevices[Device] = RoutedDevices()
    for i in range(n):
        made = Device(f"cpu:{i}", Suspicions(), VirtualTimers())
        settings = DeviceSettings(name=made.name, budget_bytes=16 * MiB, step_tokens=100)
        made.fleet = FleetSettings(models=(), device=settings, link=link, preset=preset)
        found.fleet_policy = preset_of(made.fleet).fleet
        reports = tuple(replace(MODEL, name=name, costs=COSTS) for name in MODELS)
        report = DeviceReport(
            device=made.name,
            now=0.0,
            page_bytes=1,
            total=1,
            free=1,
            reclaiming=0,
            owners={},
            models=reports,
            jobs=0,
            draining=False,
        )
        made.worker_serves(ReadyMsg(specs=MODELS, failed={}, report=report))
        found.add(made)
    return found


COSTS = StepCosts(0.0, 1e-3, 0.0, 0.0, 0.0)


def asked(name: str, n: int, tokens: int = 10) -> Submission:
    return Submission(id=f"{name}{n}", model=name, prompt=tuple(range(tokens)), max_tokens=4)


def test_requests_go_by_what_the_shared_link_can_carry() -> None:
    found = devices(3, LinkSettings(bytes_per_second=1.5 * NEED, shared=True))
    own = LinkSettings(bytes_per_second=2.0 * NEED)
    found["cpu:2"].fleet = replace(found["cpu:2"].fleet, link=own)

    def stream(ids: object, *calls: object) -> Client:
        return Client(asked("a", 0), lambda ids: None, lambda ids, paused: None, set())

    router = RequestRouter(found, stream)

    def home(name: str, n: int = 0) -> str:
        router.submit([asked(name, n)])
        (at,) = (d.name for d in found.values() if f"{name}{n}" in d.requests)
        return at

    assert home("a") == "cpu:0"
    assert home("a", 1) == "cpu:0", "where it is active"
    assert home("b") == "cpu:2", "the shared link does not carry two of them"
    assert home("c") == "cpu:1", "where nothing fits, it goes to the fewest others"


def test_what_a_device_reports_of_its_link() -> None:
    (device,) = devices(1, LinkSettings(bytes_per_second=100.0, shared=True)).values()
    use = device.link_use(asked("a", 0, tokens=250))
    assert use is not None
    read = decode_bytes(MODELS["a"])
    assert (use.capacity, use.demand, dict(use.active)) == (100.0, NEED, {})
    assert use.prefill_seconds == max(0.25, 3 * read / 100.0), "each of three passes reads it all"
    (alone,) = devices(1, LinkSettings(bytes_per_second=100.0)).values()
    other = alone.link_use(asked("a", 0))
    assert other is not None
    assert other.host != use.host
    (unpaced,) = devices(1, LinkSettings(shared=True)).values()
    assert unpaced.link_use(asked("a", 0)) is None
    (copies,) = devices(1, LinkSettings(bytes_per_second=1.0), "balloon").values()
    assert copies.link_use(asked("a", 0)) is None


@pytest.mark.parametrize("name", ["Llama-3-8b", "Llama-3.2-3b", "Mixtral-8x7B", "Qwen3-30B-A3B"])
def test_a_decode_step_reads_as_much_live_as_simulated(name: str) -> None:
    model: ModelSpec = facts(name).spec(max_model_len=1024)
    simulated = pass_traffic(PassSizes.of(model), 1, 1, 0.0, 132).link
    assert decode_bytes(model) == pytest.approx(simulated, rel=0.01)
