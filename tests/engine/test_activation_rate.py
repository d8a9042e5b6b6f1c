"""How quickly weights come is learned from activations, whatever it is that takes their time."""

from __future__ import annotations

import pytest

from ballast.core.link import LinkRates
from ballast.engine.activation_rate import ActivationRate
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.sim.test_simulate import COSTS, PAGE, fleet, spec, submissions


def test_activations_that_wait_for_others_are_no_slower() -> None:
    rate = ActivationRate()
    assert rate.bytes_per_second is None
    for transfer in range(4):
        rate.begin(transfer, 1.0)
    for transfer in range(4):
        rate.end(transfer, 1000, 3.0 + 2 * transfer, failed=False)
        assert rate.bytes_per_second == pytest.approx(500.0)


def test_what_failed_or_brought_nothing_is_no_measure() -> None:
    rate = ActivationRate()
    for transfer, (n_bytes, failed) in enumerate([(1000, True), (0, False)]):
        rate.begin(transfer, float(transfer))
        rate.end(transfer, n_bytes, transfer + 0.5, failed=failed)
    assert rate.bytes_per_second is None


def test_the_last_activations_count_most() -> None:
    rate = ActivationRate()
    for transfer in range(80):
        rate.begin(transfer, 10.0 * transfer)
        slow = transfer < 40
        rate.end(transfer, 1000, 10.0 * transfer + (8.0 if slow else 1.0), failed=False)
    assert rate.bytes_per_second == pytest.approx(1000.0, rel=0.25)


@pytest.mark.parametrize("page_seconds", [0.0, 4 * PAGE / 1e8])
def test_policies_see_what_mapping_adds(page_seconds: float) -> None:
    """The link's own rate is that of a copy alone; with pages that take long to map, weights come
    more slowly."""
    specs = [spec(f"m{i}", weight_pages=60) for i in range(3)]
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs},
        link=LinkRates.even(1e8),
        overhead=1e-4,
        page_seconds=page_seconds,
    )
    rates: list[float] = []

    def observe(now: float, state: DeviceState) -> None:
        view = device_view(state)
        assert view.link_bytes_per_second == 1e8
        rates.append(view.weights_bytes_per_second)

    done = simulate(
        fleet("swap", specs, 90),
        specs,
        submissions([s.name for s in specs], 20, seed=1),
        profile,
        lambda now, output: None,
        observe=observe,
    )
    done.state.validate()
    assert sum(m.activations for m in done.state.models.values()) > 3
    assert rates[0] == 1e8
    assert rates[-1] == pytest.approx(profile.moving(PAGE).to_device)
