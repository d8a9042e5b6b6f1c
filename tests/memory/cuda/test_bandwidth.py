"""What copies reach, over a stand-in whose copies take what it was told."""

from __future__ import annotations

import pytest

from ballast.core.errors import DeviceError, OutOfMemory
from ballast.core.units import MiB
from ballast.memory.cuda.bandwidth import MeasuredBandwidth, measure_bandwidth
from tests.memory.fake_cuda import FakeDriver

RATE = 25e9


def test_copies_are_timed_by_the_device() -> None:
    driver = FakeDriver(bandwidth=RATE)
    found = measure_bandwidth(driver, 0, 3 * MiB)
    assert found.to_device == pytest.approx(RATE)
    assert found.to_host == pytest.approx(RATE)
    assert found.memory == pytest.approx(2 * RATE)
    assert isinstance(found, MeasuredBandwidth)
    assert driver.is_clean()


@pytest.mark.parametrize("call", ["map", "pin", "copy_to_host", "new_event", "set_access"])
def test_after_an_error_nothing_is_left(call: str) -> None:
    driver = FakeDriver(bandwidth=RATE)
    driver.fail(call)
    with pytest.raises(DeviceError):
        measure_bandwidth(driver, 0, MiB)
    assert driver.is_clean()


def test_a_full_device_says_so() -> None:
    driver = FakeDriver(n_bytes=4 * MiB, bandwidth=RATE)
    with pytest.raises(OutOfMemory):
        measure_bandwidth(driver, 0, 3 * MiB)
    assert driver.is_clean()
