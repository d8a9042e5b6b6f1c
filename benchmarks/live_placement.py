"""Start a simulated cluster with its models where a live server of the same fleet has them.

A server places models before it has loaded any, by the sizes in their checkpoints' headers; a
cluster in virtual time knows all that they need, and may choose other devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.cluster.placing import Homes, homes_of
from ballast.core.fleet import DeviceCapacity, FleetDecision, FleetView, ModelDemand
from ballast.core.settings import FleetSettings
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.replica_choice import Replica
from ballast.policy.presets import Preset
from ballast.sim.cluster_files import ClusterFiles


@dataclass(frozen=True)
class PlacedAlready(FleetPolicy):
    """A fleet policy that finds its models placed at the start, and decides all the rest."""

    policy: FleetPolicy
    homes: Homes

    @property
    def moves(self) -> bool:
        return self.policy.moves

    @property
    def replicates(self) -> bool:
        return self.policy.replicates

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return {need.model: list(self.homes[need.model]) for need in needs}

    def route(self, replicas: Sequence[Replica]) -> str:
        return self.policy.route(replicas)

    def decodes(self, replicas: Sequence[Replica]) -> str:
        return self.policy.decodes(replicas)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return self.policy(view, memo)


def placed_live(preset: Preset, servers: Sequence[FleetSettings]) -> ClusterFiles:
    """What a cluster of all devices of `servers` starts with: each model where its server has it.

    Devices of the cluster have the names of those of the servers.
    """
    homes: Mapping[str, list[str]] = {
        m: at for fleet in servers for m, at in homes_of(fleet).items()
    }
    return ClusterFiles(homes=PlacedAlready(preset.fleet, homes))
