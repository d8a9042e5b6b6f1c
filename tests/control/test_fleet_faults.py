"""A fleet whose workers die, whose connections stand still and whose clients leave, by seeds."""

from __future__ import annotations

from typing import Any

import pytest

from ballast.control.leases import Leases
from benchmarks import fault_world
from benchmarks.fleet_faults import WRONG, world_of


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_no_fault_loses_an_answer_or_a_page(first: int) -> None:
    deaths = moved = lent = 0
    for seed in range(first, first + 20):
        world = world_of(seed)
        world.run()
        found = {key: getattr(world, key) for key in WRONG}
        assert not any(found.values()), f"seed {seed}: {found}"
        deaths += world.deaths
        lent += world.lent
        moved += sum(device.moved_in for device in world.devices.values())
    assert deaths > 10
    assert moved > 5
    assert lent > 50


def test_a_borrower_that_is_not_killed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def condemn(self: Leases, pair: Any, lender: str, borrower: str) -> None:
        pair.condemned = True

    monkeypatch.setattr(Leases, "_condemn", condemn)
    monkeypatch.setattr(fault_world, "HORIZON", 70.0)
    world = world_of(35)
    world.run()
    assert world.overdue > 0


def test_a_successor_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def reap(self: Leases, device: str) -> None:
        real(self, device)
        for user in list(self._dead[device].users) if device in self._dead else ():
            self._release(device, user)

    real = Leases._reap
    monkeypatch.setattr(Leases, "_reap", reap)
    world = world_of(3)
    world.run()
    assert world.twice > 0


def test_a_seed_replays() -> None:
    one, two = world_of(7), world_of(7)
    one.run()
    two.run()
    assert one.timers.now() == two.timers.now()
    assert [c.tokens for c in one.clients] == [c.tokens for c in two.clients]
