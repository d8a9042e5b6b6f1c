"""Devices of a host that lend to each other: words take their time, leaps change nothing, and what
lies on borrowed pages is read over the way between the devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ballast.core.actions import Lend, Recall
from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.kv.layout import fitted
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.lending import SimLeases
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.peer_costs import ASSUMED, PeerCosts
from ballast.sim.topology import ClusterLinks, PeerLinks, places
from tests.effort import some
from tests.engine.fresh import check_views
from tests.sim.test_leap import COSTS
from tests.sim.test_story import conversations

LINK = LinkRates.even(1e8)
NAMES = ("d0", "d1")
MEMORY = ClusterLinks(per_host=2, peers=PeerLinks.MEMORY)
PORTS = ClusterLinks(per_host=2, peers=PeerLinks.NVLINK, port=LinkRates.even(2e8))
SLOW = ClusterLinks(per_host=2, peers=PeerLinks.NVLINK, port=LinkRates.even(2e6))


class Pair:
    """The second device is short of memory; the first lends to it, and asks all of it back."""

    def __init__(
        self,
        seed: int,
        joints: ClusterLinks,
        *,
        leaps: bool,
        recall: float = 60.0,
        peers: PeerCosts = ASSUMED,
    ) -> None:
        self.recorded: list[tuple[str, float, Output]] = []
        self.entries: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
        self.seen: Counter[str] = Counter()
        fleet, specs, requests = conversations(seed, "swap")
        specs = [fitted(s, None, fleet.device.page_bytes) for s in specs]
        costs = {s.name: COSTS for s in specs}
        profile = MachineProfile(costs=costs, link=LINK, overhead=3e-4, peers=peers)
        at = places(joints, [(LINK, 1)] * 2)
        self.devices: dict[str, SimDevice] = {}
        for name, times, place in zip(NAMES, (3, 1), at, strict=True):
            self.devices[name] = SimDevice(
                replace(fleet.device, name=name, budget_bytes=times * fleet.device.budget_bytes),
                specs,
                resolve("swap"),
                profile,
                lambda now, output, name=name: self.recorded.append((name, now, output)),  # type: ignore[misc]
                self.entries[name].extend,
                self._observe,
                leaps=leaps,
                world=place.host.world,
                route=place.route,
            )
        last = max(r.arrival for r in requests)
        there = {n: (self.devices[n], place) for n, place in zip(NAMES, at, strict=True)}
        self.leases = SimLeases(at[0].host, there)
        self.crashed: list[str] = []
        self.leases.on_crash.append(lambda at, name: self.crashed.append(name))
        orders: list[tuple[float, Lend | Recall]] = [
            (0.05, Lend("d1", 30)),
            (last / 2, Lend("d1", 20)),
            (last + 0.3, Recall("d1", None, recall)),
        ]
        asked = [replace(r, id=f"{r.id}-{i}") for i in range(3) for r in requests]
        for r in asked:
            self.devices["d1"].submit(r)
        for r in requests[:4]:
            self.devices["d0"].submit(r)
        for device in self.devices.values():
            device.drain(last + 1.0)
        for moment, command in orders:
            for device in self.devices.values():
                device.advance(moment)
            self.leases.order(moment, "d0", command, by_operator=True)
        for device in self.devices.values():
            device.end()
        ended = sum(
            isinstance(output, FinishedOutput | FailedOutput) for _, _, output in self.recorded
        )
        assert ended == len(asked) + 4
        for device in self.devices.values():
            device.state.validate()

    def _observe(self, now: float, state: Any) -> None:
        state.validate()
        check_views(state)
        for m in state.models.values():
            self.seen["used"] += m.kv.borrowed.pages > 0
        self.seen["borrowed"] = max(self.seen["borrowed"], sum(state.lending.borrowed.values()))

    def events(self, kind: str) -> list[tuple[str, float]]:
        return [
            (name, e["at"]) for name in NAMES for e in self.entries[name] if e.get("event") == kind
        ]

    @property
    def stalls(self) -> float:
        done = (e for e in self.entries["d1"] if e.get("event") == "JobDone")
        return sum(float(e.get("stall", 0.0)) for e in done)


def tokens(pair: Pair) -> dict[str, int]:
    """Number of tokens of each request; none twice."""
    found: Counter[str] = Counter()
    for _, _, output in pair.recorded:
        if isinstance(output, TokenOutput):
            assert output.index == found[output.request_id]
            found[output.request_id] += 1
    return dict(found)


def by_device(pair: Pair) -> list[list[tuple[float, Output]]]:
    return [[(at, o) for d, at, o in pair.recorded if d == name] for name in NAMES]


@pytest.mark.parametrize("joints", [MEMORY, PORTS])
def test_leaps_change_nothing_where_devices_lend(joints: ClusterLinks) -> None:
    seen: Counter[str] = Counter()
    for seed in some(range(5), 3):
        one, many = (Pair(seed, joints, leaps=leaps) for leaps in (False, True))
        assert by_device(one) == by_device(many), f"seed {seed}"
        for kind in ("Lent", "AskedBack", "Returned"):
            assert one.events(kind) == many.events(kind), f"seed {seed}"
            seen[kind] += len(many.events(kind))
        seen["leaps"] += len(many.events("Leap"))
        seen += one.seen
        for device in many.devices.values():
            assert device.state.lending.lent == device.state.lending.borrowed == {}
    assert min(seen[kind] for kind in ("Lent", "AskedBack", "Returned", "leaps", "used")) > 5, seen


def test_a_word_takes_its_time() -> None:
    pair = Pair(0, MEMORY, leaps=True)
    ((name, at), *_) = pair.events("Lent")
    assert name == "d1"
    assert at == pytest.approx(0.05 + 2 * ASSUMED.message)  # to the lender, and on to the borrower


def test_kv_on_borrowed_pages_is_read_over_the_way_between_the_devices() -> None:
    """A job waits for it only where the way is too slow to be done with its work."""
    free, quick, slow = (Pair(1, joints, leaps=True) for joints in (MEMORY, PORTS, SLOW))
    for pair in (free, quick, slow):
        assert pair.seen["used"] > 0
    assert free.stalls == 0.0
    assert 0.0 <= quick.stalls < slow.stalls
    assert slow.stalls > 0.0


def test_devices_that_cannot_lend_say_why() -> None:
    with pytest.raises(ConfigError, match="do not reach each other"):
        Pair(0, ClusterLinks(per_host=2), leaps=True)


@pytest.mark.parametrize("joints", [MEMORY, PORTS])
def test_a_borrower_that_is_late_is_killed_and_its_successor_answers(
    joints: ClusterLinks,
) -> None:
    calm, late = Pair(0, joints, leaps=True), Pair(0, joints, leaps=True, recall=0.0)
    assert late.crashed == ["d1"]
    assert tokens(late) == tokens(calm)
    assert late.leases.standing == ()
    for device in late.devices.values():
        assert device.state.lending.lent == device.state.lending.borrowed == {}
    again = Pair(0, joints, leaps=False, recall=0.0)
    assert by_device(again) == by_device(late)


def test_what_a_profile_has_measured_between_devices_takes_its_time() -> None:
    slow = PeerCosts(message=5e-3, home=1e5)
    free, costly = Pair(1, MEMORY, leaps=True), Pair(1, MEMORY, leaps=True, peers=slow)
    ((_, at), *_) = costly.events("Lent")
    assert at == pytest.approx(0.05 + 2 * slow.message)
    assert any(e["vacated"]["home"] for e in costly.entries["d1"] if "vacated" in e)
    assert costly.recorded[-1][1] > free.recorded[-1][1]
    assert tokens(costly) == tokens(free)
