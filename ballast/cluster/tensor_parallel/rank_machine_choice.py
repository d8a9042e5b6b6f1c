"""Choose and build the machine of a tensor-parallel rank: CPU or GPU.

Used by `GroupMachine` for the first rank, and by each further rank's process.
"""

from __future__ import annotations

from collections.abc import Callable

from ballast.cluster.tensor_parallel.cpu_rank_machine import CpuRankMachine
from ballast.cluster.tensor_parallel.rank_machine import RankMachine
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings
from ballast.weights.sharding import Shard


def rank_machine_of(
    device: DeviceSettings,
    shard: Shard,
    pace: LinkRates | None,
    clock: Clock,
    post: Callable[[Event], None],
) -> RankMachine:
    """Build the machine of a rank, by the device's kind; a `MakeRankMachine`."""
    if device.gpu is None:
        return CpuRankMachine(device, shard, pace, clock, post)
    from ballast.cluster.tensor_parallel.cuda_rank_machine import CudaRankMachine

    return CudaRankMachine(device, shard, pace, clock, post)
