"""Devices that share links: one order of events, with leaps or without, together or apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ballast.core.errors import BrokenPromise
from ballast.core.event import Output
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.topology import APART, ClusterLinks, HostPlace, places
from ballast.sim.world import World
from tests.effort import some
from tests.sim.restless import register, restless_world
from tests.sim.test_enough_memory import world as fixed_world
from tests.sim.test_leap import COSTS

LINK = LinkRates.even(1e8)
SHARED = ClusterLinks(per_host=2, host=LinkRates.even(1.2e8))
Part = tuple[FleetSettings, list[ModelSpec], list[Submission]]


class Run:
    """Devices at the given places, to their last answers; each has requests of its own."""

    def __init__(
        self, parts: Sequence[Part], at: Sequence[HostPlace], *, leaps: bool, ahead: int = 0
    ) -> None:
        self.entries: list[list[dict[str, Any]]] = [[] for _ in parts]
        self.recorded: list[list[tuple[float, Output]]] = [[] for _ in parts]
        self.devices = []
        for i, ((fleet, specs, requests), place) in enumerate(zip(parts, at, strict=True)):
            costs = {s.name: COSTS for s in specs}
            profile = MachineProfile(
                costs=costs,
                link=LINK,
                overhead=3e-4,
                wake=7e-4,
                settling=(5e-4, 2e-4, 1e-4),
                switch=6e-4,
                turn=4e-4,
                answer=1e-4,
                ahead=ahead,
            )

            def said(now: float, output: Output, i: int = i) -> None:
                self.recorded[i].append((now, output))

            device = SimDevice(
                replace(fleet.device, name=f"d{i}"),
                specs,
                resolve(fleet.preset, fleet.options),
                profile,
                said,
                self.entries[i].extend,
                leaps=leaps,
                world=place.host.world,
                route=place.route,
            )
            for request in requests:
                device.submit(request)
            device.drain(max(r.arrival for r in requests))
            self.devices.append(device)
        for device in self.devices:
            device.end()
            device.state.pool.validate()
            for m in device.state.models.values():
                m.weights.validate()

    @property
    def seconds(self) -> list[float]:
        return [device.clock.now() for device in self.devices]

    def counts(self, what: str) -> int:
        return sum(what in e or e.get("event") == what for es in self.entries for e in es)


def parts_of(seed: int, preset: str | None, lanes: int = 1) -> list[Part]:
    """Two devices that are as short of memory as one another."""
    if preset is None:
        return [restless_world(2 * seed + i, lanes) for i in range(2)]
    return [fixed_world(2 * seed + i, preset, lanes) for i in range(2)]


SHARING = [
    (None, 0, 1),
    (None, 1, 1),
    ("swap", 0, 1),
    (None, 1, 3),
    ("swap", 1, 2),
    ("balloon", 0, 4),
]


@pytest.mark.parametrize(("preset", "ahead", "lanes"), SHARING)
def test_leaps_change_nothing_where_devices_share_a_link(
    preset: str | None, ahead: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: layers rotate, so that leaps move bytes, which slow the other device's; `ahead`: steps
    that engines schedule ahead, so that requests are put off to ends that are not certain."""
    register(monkeypatch)
    seen: Counter[str] = Counter()
    seeds = some(range(6), 3)
    for seed in seeds:
        parts = parts_of(seed, preset, lanes)
        runs = [
            Run(parts, places(SHARED, [(LINK, 1)] * 2), leaps=leaps, ahead=ahead)
            for leaps in (False, True)
        ]
        assert runs[0].recorded == runs[1].recorded, f"seed {seed}"
        assert runs[0].seconds == runs[1].seconds, f"seed {seed}"
        apart = Run(parts, places(APART, [(LINK, 1)] * 2), leaps=True, ahead=ahead)
        seen["slower"] += runs[1].recorded != apart.recorded
        seen["leaps"] += runs[1].counts("Leap")
        for device in runs[1].devices:
            seen["loads"] += sum(loads.n for loads in device.loads.values())
    assert seen["slower"] > 0.7 * len(seeds), seen
    assert seen["leaps"] > 3 * len(seeds), seen
    assert (seen["loads"] > 80 * len(seeds)) == (preset is None), seen


@pytest.mark.parametrize("leaps", [False, True])
def test_one_world_of_devices_that_share_nothing_is_as_many_worlds(
    leaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host without a link in common: the order of events is another, all else the same."""
    register(monkeypatch)
    for seed in range(4):
        parts = parts_of(seed, None)
        together = Run(parts, places(ClusterLinks(per_host=2), [(LINK, 1)] * 2), leaps=leaps)
        assert together.devices[0].world is together.devices[1].world
        apart = Run(parts, places(APART, [(LINK, 1)] * 2), leaps=leaps)
        assert together.recorded == apart.recorded, f"seed {seed}"
        assert together.seconds == apart.seconds, f"seed {seed}"


def test_a_device_that_waits_for_nothing_is_a_fault() -> None:
    fleet, specs, _ = fixed_world(0, "swap", 1)
    profile = MachineProfile(costs={s.name: COSTS for s in specs}, link=LINK, overhead=0.0)
    world = World()
    device = SimDevice(
        fleet.device, specs, resolve("swap"), profile, lambda now, output: None, world=world
    )
    world.advance(5.0)
    with pytest.raises(BrokenPromise, match="nothing will ever happen"):
        device.end()
    device.state.pool.validate()
