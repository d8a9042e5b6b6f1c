"""A further rank of a group of GPUs that are none: `python -m tests.cluster.gpu_rank`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from ballast.cluster.member_cuda import GpuMember
from ballast.cluster.rank import main
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings
from ballast.weights.sharding import Shard
from tests.engine.gpus import OnHost
from tests.memory.fake_cuda import FakeDriver

COMMAND = (sys.executable, "-m", "tests.cluster.gpu_rank")
GPUS = 2


def make(
    device: DeviceSettings,
    shard: Shard,
    pace: LinkRates | None,
    clock: Clock,
    post: Callable[[Event], None],
) -> GpuMember:
    """Implements `MakeMember`. Every process has a driver of its own, which shows both GPUs."""
    driver = FakeDriver(n_bytes=1 << 30, devices=GPUS)
    return GpuMember(device, shard, pace, clock, post, driver, OnHost())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(make=make)
