"""Route requests to devices whose models read weights over a shared link (C2CServe, 6.1, 6.2).

The fleet policy of placement `link`, for presets whose weights stay in host memory: each device can
serve every model, so that placing is routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, FleetDecision, FleetView, ModelDemand
from ballast.core.link_budget import LinkBudget
from ballast.core.units import format_bytes
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.replica_choice import LinkUse, Replica, held_prefix


@dataclass(frozen=True, slots=True)
class LinkAware(FleetPolicy):
    """Serve a model where it is active; else activate it where it fits.

    A model is active on a device while it has open requests there. An idle device is chosen where
    its prefill keeps the TTFT level, which its memory's bandwidth bounds, and where all active
    models of the host keep their TPOT levels on the host's link; of these the one that is slowest,
    so that faster ones stay for larger models. Where no idle one fits, the request waits at the
    device with the fewest open requests, of these the fastest. Without knowledge of the link the
    request goes by load and cached prefix.
    """

    @property
    def replicates(self) -> bool:
        return True

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        """Return all devices that have room for a model's KV, for each model."""
        homes = {n.model: [r.device for r in rooms if r.bytes >= n.least] for n in needs}
        for need in needs:
            if not homes[need.model]:
                largest = max((r.bytes for r in rooms), default=0)
                missing = format_bytes(need.least - largest)
                allowed = f"a device with {format_bytes(need.least)}: {missing} are missing"
                raise ConfigError("devices", need.model, allowed)
        return homes

    def route(self, replicas: Sequence[Replica]) -> str:
        active = [r for r in replicas if r.link and r.link.model in r.link.active]
        if active or not all(r.link for r in replicas):
            return held_prefix(active or replicas)
        fitting = [r for r in replicas if not r.open_requests and _fits(r, replicas)]
        if fitting:
            return max(fitting, key=_prefill_seconds).device
        return min(replicas, key=lambda r: (r.open_requests, _prefill_seconds(r))).device

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)


def _fits(replica: Replica, replicas: Iterable[Replica]) -> bool:
    """Whether a device can take the model beside what is active on its host."""
    use = replica.link
    assert use is not None
    if use.prefill_seconds > use.ttft:
        return False
    budget = LinkBudget(use.capacity)
    for other in replicas:
        if other.link is not None and other.link.host == use.host:
            for model, demand in other.link.active.items():
                budget = budget.with_(f"{model} on {other.device}", demand)
    return budget.fits(f"{use.model} on {replica.device}", use.demand)


def _prefill_seconds(replica: Replica) -> float:
    use: LinkUse | None = replica.link
    return 0.0 if use is None else use.prefill_seconds
