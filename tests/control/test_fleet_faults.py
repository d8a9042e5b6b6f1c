"""A fleet whose workers die, whose connections stand still and whose clients leave, by seeds."""

from __future__ import annotations

import pytest

from benchmarks.fault_mutations import MUTATIONS, Mutation
from benchmarks.fault_world import RESTARTING, SPITEFUL
from benchmarks.fleet_faults import WRONG, finding, world_of
from tests.effort import some


@pytest.mark.parametrize("first", some(range(0, 100, 20), 2))
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


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
@pytest.mark.slow
def test_old_defects_are_found(mutation: Mutation) -> None:
    spiteful = range(SPITEFUL - 1, 500, SPITEFUL)
    assert finding(mutation, [*range(40), *spiteful]) is not None


def test_a_seed_replays() -> None:
    one, two = world_of(7), world_of(7)
    one.run()
    two.run()
    assert one.timers.now() == two.timers.now()
    assert [c.tokens for c in one.clients] == [c.tokens for c in two.clients]


def test_worlds_whose_server_restarts() -> None:
    restarts = again = 0
    seeds = [*some(range(0, 20 * RESTARTING, RESTARTING), 8), 570, 1710, 2150]
    for seed in seeds:
        world = world_of(seed)
        world.run()
        assert not any(getattr(world, key) for key in WRONG), f"seed {seed}"
        restarts += world.servers - 1
        cut = {c.submission.id for c in world.clients if c.cut}
        asked = {c.submission.id: c for c in world.clients}
        again += sum(asked[f"{i}+"].tokens != [] for i in cut if f"{i}+" in asked)
    assert restarts >= 0.8 * len(seeds)
    assert again > 0.4 * len(seeds)


@pytest.mark.parametrize("seed", [811, 908, 1209, 1627, 2484, 4447])
def test_what_a_longer_run_once_found_stays_mended(seed: int) -> None:
    """A request went to a device without a worker though one with a worker only held it back; a
    worker that had died answered a command over its successor's connection; a request that was held
    back was sent to a worker that served its model no more; ten suspects took longer than a world
    lasted; a request that had departed came back to a device that its model was leaving. In world
    2484 six spares fail in a row, so that the next one is started after the world has ended."""
    world = world_of(seed)
    world.run()
    assert not any(getattr(world, key) for key in WRONG)
