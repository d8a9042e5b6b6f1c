"""Faults of a fleet in virtual time: every seed is a schedule that replays.

Two to eight devices, clients that leave or stop reading, orders to migrate, prefill and decode
apart; workers die at any moment, connections stand still for seconds, weights do not come. The
controller is the server's (`ballast.control`), the workers are those of `benchmarks.fault_world`.

- `lost`: accepted requests without an end (goal 0).
- `repeated`: tokens out of order or after an end, and second ends (goal 0).
- `changed`: answers that differ from an undisturbed run's (goal 0).
- `leaked`: requests and imported KV that workers keep for nothing, and orders without an end (0).
- `deaths`, `moved`: workers that died, and requests that migrated with their KV.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from benchmarks.common import finish, options
from benchmarks.fault_world import FaultWorld

SEEDS, QUICK_SEEDS = 10_000, 500


def world_of(seed: int) -> FaultWorld:
    """Return the world of a seed."""
    rng = random.Random(-seed - 1)
    return FaultWorld(seed, rng.randrange(2, 9), rng.randrange(1, 25))


def main() -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, help="run one seed alone")

    args = options(__doc__, extra=extra)
    n = QUICK_SEEDS if args.quick else SEEDS
    seeds = range(n) if args.seed is None else [args.seed]
    found = {"lost": 0, "repeated": 0, "changed": 0, "leaked": 0}
    deaths = moved = requests = 0
    wrong: list[int] = []
    began = time.perf_counter()
    for seed in seeds:
        world = world_of(seed)
        world.run()
        counts = {key: getattr(world, key) for key in found}
        if any(counts.values()):
            wrong.append(seed)
            print(f"seed {seed}: {counts}")
        for key, count in counts.items():
            found[key] += count
        deaths += world.deaths
        requests += len(world.clients)
        moved += sum(device.moved_in for device in world.devices.values())
    print(
        f"{len(seeds)} seeds, {requests} requests, {deaths} deaths, {moved} moved with their KV: "
        + ", ".join(f"{count} {key}" for key, count in found.items())
    )
    results = {
        "seeds": len(seeds),
        **found,
        "deaths": deaths,
        "moved": moved,
        "requests": requests,
        "wrong_seeds": wrong,
        "seconds": time.perf_counter() - began,
    }
    finish(args, "fleet_faults", results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
