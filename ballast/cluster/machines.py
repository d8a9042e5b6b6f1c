"""Which machine a device is: a GPU, one process, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.settings import FleetSettings
from ballast.live.cpu_machine import CpuMachine
from ballast.live.cuda_machine import CudaMachine
from ballast.live.machine import Machine

if TYPE_CHECKING:
    from ballast.cluster.remote import RemoteRank


def machine_of(
    fleet: FleetSettings,
    clock: Clock,
    post: Callable[[Event], None],
    ranks: Sequence[RemoteRank] = (),
) -> Machine:
    """As the fleet's device says. `ranks`: as `start_ranks` has begun to start them, if it has;
    their start then goes on beside the caller's own."""
    whole = fleet.of_one_device("this command")
    if whole.tensor_parallel == 1:
        machine = CpuMachine if whole.gpu is None else CudaMachine
        return machine(fleet, clock, post)
    # Here, so that a device without ranks needs nothing of what they talk through.
    from ballast.cluster.member import of_rank
    from ballast.cluster.ranks import GroupMachine
    from ballast.cluster.remote import start_ranks

    of_rank(whole)  # raises before processes are started
    return GroupMachine(whole, fleet.link.pace, clock, post, ranks or start_ranks(fleet))


def machine_of_one_rank(
    fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]
) -> Machine:
    """The same of a device that is one process. Raises ConfigError for another."""
    whole = fleet.of_one_device("this command")
    if whole.gpu is None or whole.tensor_parallel > 1:
        return CpuMachine(fleet, clock, post)  # which refuses devices of several
    return CudaMachine(fleet, clock, post)
