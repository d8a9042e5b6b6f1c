"""What transfers show of a link; a model's weights are as they were afterwards."""

from __future__ import annotations

from pathlib import Path

from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.live.device import LiveDevice
from ballast.sim.measure_link import LinkMeter, rates_of
from tests.engine.checkpoints import make_llama


def ends(n_bytes: int, *seconds: float) -> list[TransferDoneEvent]:
    return [TransferDoneEvent(i, n_bytes, s) for i, s in enumerate(seconds)]


def test_what_mixing_keeps_holds_for_activations_too() -> None:
    """Alone 100 and 50 a second on pages long there, 25 each at once; activations bring 80."""
    alone = {Direction.TO_DEVICE: ends(100, 1.0, 1.0), Direction.TO_HOST: ends(100, 2.0, 2.0)}
    found = rates_of(ends(160, 2.0), alone, [(100, 4.0), (50, 2.0)])
    assert found == LinkRates(80.0, 50.0, 20.0, 25.0)


def test_nothing_is_quicker_beside_others() -> None:
    alone = {direction: ends(100, 1.0) for direction in Direction}
    assert rates_of(ends(100, 1.0), alone, [(100, 0.9)]) == LinkRates(100.0, 100.0, 100.0, 100.0)


def test_a_model_on_the_device_is_copied_both_ways(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m", 0)
    budget = DeviceSettings(budget_bytes=64 * MiB, page_bytes=64 * KiB, step_tokens=32, threads=1)
    models = (ModelSettings(name="m", path=str(path), dtype="float32"),)
    device = LiveDevice(FleetSettings(models=models, device=budget), lambda outputs: None)
    try:
        m = device.state.models["m"]
        assert m.weights.activate(device.state.next_transfer()) is None
        (done,) = device.inbox.take(None)
        assert isinstance(done, TransferDoneEvent)
        assert m.weights.transfer_landed()
        meter = LinkMeter()
        meter.activated(done)
        meter.measure(device, m)
        found = meter.rates()
        assert found.positive
        assert found.to_device_mixed <= found.to_device
        assert found.to_host_mixed <= found.to_host
        moved = {d: [e.n_bytes for e in result] for d, result in meter.alone.items()}
        assert moved == {key: [m.spec.weight_bytes] for key in Direction}
        m.weights.validate()
        device.state.pool.validate()
    finally:
        device.close()
