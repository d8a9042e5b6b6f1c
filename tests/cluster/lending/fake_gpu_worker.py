"""A worker process of a GPU's stand-in: run as a script."""

from __future__ import annotations

from collections.abc import Callable

from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.worker.device_thread import Outbox, Progress, Record, WorkerDevice
from ballast.cluster.worker.process import main
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.settings import FleetSettings


def gpu_device(
    fleet: FleetSettings,
    outbox: Outbox,
    record: Record,
    progress: Progress,
    segments: SegmentClient | None,
) -> WorkerDevice:
    from ballast.live.cuda_machine import CudaMachine
    from ballast.live.device import LiveDevice
    from tests.engine.gpus import OnHost
    from tests.memory.fake_cuda import FakeDriver

    driver = FakeDriver(n_bytes=1 << 30, devices=2, exclusive=True)

    def machine(fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> CudaMachine:
        return CudaMachine(fleet, clock, post, driver, OnHost())

    return LiveDevice(fleet, outbox, record=record, exchange=segments, make_machine=machine)


if __name__ == "__main__":
    main(make_device=gpu_device, warm_up=lambda: None)
