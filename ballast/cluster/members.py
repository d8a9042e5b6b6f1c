"""Which member a rank of a tensor-parallel group is: a CPU's, or a GPU's."""

from __future__ import annotations

from collections.abc import Callable

from ballast.cluster.member import CpuMember, Member
from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings
from ballast.weights.sharding import Shard


def member_of(
    device: DeviceSettings,
    shard: Shard,
    pace: LinkRates | None,
    clock: Clock,
    post: Callable[[Event], None],
) -> Member:
    """Implements `MakeMember`, by the device's kind."""
    if device.gpu is None:
        return CpuMember(device, shard, pace, clock, post)
    from ballast.cluster.member_cuda import GpuMember

    return GpuMember(device, shard, pace, clock, post)
