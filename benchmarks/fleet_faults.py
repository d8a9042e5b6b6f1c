"""Faults of a fleet in virtual time: every seed is a schedule that replays.

Two to eight devices, clients that leave or stop reading, orders to migrate, to lend and to recall,
to place and withdraw models and to drain devices, also by a fleet policy, prefill and decode apart;
workers die at any moment, connections stand still for seconds, weights do not come, pages are not
returned. The controller is the server's (`ballast.control`), the workers are those of
`benchmarks.fault_world`, which lend by the engine's code.

- `lost`: accepted requests without an end (goal 0).
- `repeated`: tokens out of order or after an end, and second ends (goal 0).
- `changed`: answers that differ from an undisturbed run's (goal 0).
- `leaked`: requests and imported KV that workers keep for nothing, orders without an end, pages
  that are lent to nobody (0).
- `twice`: lent pages that their lender had back while a borrower still mapped them, and pages of a
  dead worker that are mapped when its successor starts (0).
- `overdue`: pages that a borrower keeps, and lives, long after they were due (0).
- `homeless`: models that no device is to serve any more that takes requests (0).
- `deaths`, `moved`: workers that died, and requests that migrated with their KV.
- `lent`, `kills`: pages lent, and workers that were killed because they did not return them.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.common import finish, options
from benchmarks.fault_world import FaultWorld

SEEDS, QUICK_SEEDS = 10_000, 500
WRONG = ("lost", "repeated", "changed", "leaked", "twice", "overdue", "homeless")


def world_of(seed: int) -> FaultWorld:
    """Return the world of a seed."""
    rng = random.Random(-seed - 1)
    return FaultWorld(seed, rng.randrange(2, 9), rng.randrange(1, 25))


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one seed."""

    seed: int
    wrong: dict[str, int]
    deaths: int
    requests: int
    moved: int
    lent: int
    kills: int


def run(seed: int) -> Found:
    """Run one seed."""
    logging.disable(logging.CRITICAL)  # deaths and suspects are what it is about
    world = world_of(seed)
    world.run()
    moved = sum(device.moved_in for device in world.devices.values())
    wrong = {key: getattr(world, key) for key in WRONG}
    counts = len(world.clients), moved, world.lent, world.kills
    return Found(seed, wrong, world.deaths, *counts)


def main() -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, help="run one seed alone")

    args = options(__doc__, extra=extra)
    n = QUICK_SEEDS if args.quick else SEEDS
    seeds = range(n) if args.seed is None else [args.seed]
    began = time.perf_counter()
    with ProcessPoolExecutor() as processes:
        found = list(processes.map(run, seeds, chunksize=20))
    failed = [f for f in found if any(f.wrong.values())]
    for f in failed:
        print(f"seed {f.seed}: {f.wrong}")
    results = {
        "seeds": len(found),
        **{key: sum(f.wrong[key] for f in found) for key in WRONG},
        "deaths": sum(f.deaths for f in found),
        "requests": sum(f.requests for f in found),
        "moved": sum(f.moved for f in found),
        "lent": sum(f.lent for f in found),
        "kills": sum(f.kills for f in found),
        "wrong_seeds": [f.seed for f in failed],
        "seconds": time.perf_counter() - began,
    }
    finish(args, "fleet_faults", results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
