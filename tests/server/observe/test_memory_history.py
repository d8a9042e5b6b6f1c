"""A day of devices' memory, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ballast.core.report import DeviceReport
from ballast.server.observe.memory_history import MemoryHistory, MemoryMoment

OWNERS = {f"{use}:model-{i}": 1 + 900 * (i < 3) for i in range(100) for use in ("weights", "kv")}
REPORT = DeviceReport(
    device="cpu:0",
    now=0.0,
    page_bytes=4096,
    total=10_000,
    free=10_000 - sum(OWNERS.values()),
    reclaiming=0,
    owners=OWNERS,
    models=(),
    jobs=0,
    draining=False,
)


def test_more_than_a_day_of_a_hundred_models_is_bounded_and_reaches_a_day_back() -> None:
    history, now = MemoryHistory(), 1e9
    for step, n in ((90.0, 1100), (20.0, 190), (2.0, 160)):
        for _ in range(n):
            now += step
            history.add(now, [REPORT], 3)
    found = {seconds: history.last(seconds, now) for seconds in (240.0, 3600.0, 86400.0)}
    for seconds, every in ((240.0, 2.0), (3600.0, 20.0), (86400.0, 180.0)):
        samples = [msgspec.json.decode(s, type=MemoryMoment) for s in found[seconds].samples]
        assert found[seconds].every == every
        assert seconds * 0.98 <= now - samples[0].time <= seconds
        for sample in samples[:2]:
            [device] = sample.devices
            assert sum(device.owners.values()) + device.free == device.total
            assert len(device.owners) == 8  # three models of each use, and the small ones together
            assert device.owners["kv:"] == 97
    assert sum(len(s) for found_ in found.values() for s in found_.samples) < 500_000


def test_a_clock_that_is_set_back_does_not_stop_it() -> None:
    history = MemoryHistory()
    history.add(1000.0, [REPORT], 0)
    history.add(10.0, [replace(REPORT, free=0)], 0)
    assert len(history.last(60.0, 20.0).samples) == 2  # until they are older than what is asked for
