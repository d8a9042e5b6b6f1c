"""Choose and build the machine (memory, link, models) of a device: CPU, GPU, or a group of ranks.

Used by the worker's process, in-process benchmarks and the simulator's calibration.
"""

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
    from ballast.cluster.tensor_parallel.remote_rank import RemoteRank


def machine_of(
    fleet: FleetSettings,
    clock: Clock,
    post: Callable[[Event], None],
    ranks: Sequence[RemoteRank] = (),
) -> Machine:
    """Build the machine of the fleet's only device; a `MakeMachine`.

    `ranks`: the further ranks, if the caller has started them already by `start_ranks`; empty: they
    are started here.
    """
    whole = fleet.of_one_device("this command")
    if whole.tensor_parallel == 1:
        machine = CpuMachine if whole.gpu is None else CudaMachine
        return machine(fleet, clock, post)
    # Imported here: a device of one process does not need these modules.
    from ballast.cluster.tensor_parallel.group_machine import GroupMachine
    from ballast.cluster.tensor_parallel.rank_machine import settings_of_rank
    from ballast.cluster.tensor_parallel.remote_rank import start_ranks

    settings_of_rank(whole)  # may raise; here, before processes are started
    return GroupMachine(whole, fleet.link.pace, clock, post, ranks or start_ranks(fleet))


def machine_of_one_rank(
    fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]
) -> Machine:
    """Build the machine of a device of one process. Raises ConfigError for a group."""
    whole = fleet.of_one_device("this command")
    if whole.gpu is None or whole.tensor_parallel > 1:
        return CpuMachine(fleet, clock, post)  # which refuses a group
    return CudaMachine(fleet, clock, post)
