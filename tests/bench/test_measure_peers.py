"""What goes on between devices is measured by real memory and worker processes."""

from __future__ import annotations

import pytest

from ballast.bench.measure_peers import measure_peers, memory_costs
from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import KiB
from tests.cluster.worker.test_worker import FAKE, FLEET


def test_memory_between_devices() -> None:
    costs = memory_costs(256 * KiB, 1)
    assert costs.borrow is not None
    assert costs.give_back is not None
    assert costs.read is not None
    assert min(costs.borrow, costs.give_back, costs.read, costs.home) > 0
    assert max(costs.read, costs.home) < 1e13, "bytes a second of any memory"


def test_starts_and_messages_of_worker_processes() -> None:
    costs = measure_peers(FLEET, 1, command=FAKE)
    assert min(costs.message, costs.start, costs.cold_start, costs.prepare) > 0
    assert costs.message < costs.cold_start


def test_gpus_are_not_measured() -> None:
    gpu = FleetSettings(models=(), device=DeviceSettings(name="cuda:0", budget_bytes=2**30))
    with pytest.raises(ConfigError, match="CPU devices"):
        measure_peers(gpu)
