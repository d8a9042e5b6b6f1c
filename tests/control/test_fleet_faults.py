"""A fleet whose workers die, whose connections stand still and whose clients leave, by seeds."""

from __future__ import annotations

import pytest

from benchmarks.fleet_faults import world_of


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_no_fault_loses_repeats_or_changes_an_answer(first: int) -> None:
    deaths = moved = 0
    for seed in range(first, first + 20):
        world = world_of(seed)
        world.run()
        found = world.lost, world.repeated, world.changed, world.leaked
        assert found == (0, 0, 0, 0), f"seed {seed}"
        deaths += world.deaths
        moved += sum(device.moved_in for device in world.devices.values())
    assert deaths > 10
    assert moved > 5


def test_a_seed_replays() -> None:
    one, two = world_of(7), world_of(7)
    one.run()
    two.run()
    assert one.timers.now() == two.timers.now()
    assert [c.tokens for c in one.clients] == [c.tokens for c in two.clients]
