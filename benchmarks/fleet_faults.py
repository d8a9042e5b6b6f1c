"""Faults of a fleet in virtual time: every seed is a schedule that replays.

Two to eight devices, clients that leave or stop reading, orders to migrate, to lend and to recall,
to place and withdraw models and to drain devices, also by a fleet policy, prefill and decode apart;
workers die at any moment, or hang and answer nothing, connections and links between workers stand
still for seconds, messages are late or lost with their socket, clocks differ, weights do not come,
pages are not returned, spare workers hang while they are prepared. In every fourth world faults
strike in the midst of migrations. In every tenth the server ends in the midst of all that, once or
twice, and its successor begins while the old workers still compute: it finds none of them, as they
end with its socket, and clients ask again. The controller is the server's (`ballast.control`), the
workers are those of `benchmarks.fault_world`, which lend by the engine's code.

- `lost`: accepted requests without an end (goal 0).
- `repeated`: tokens out of order or after an end, and second ends (goal 0).
- `changed`: answers that differ from an undisturbed run's (goal 0).
- `leaked`: requests and imported KV that workers keep for nothing, orders without an end, pages
  that are lent to nobody (0).
- `twice`: lent pages that their lender had back while a borrower still mapped them, and pages of a
  dead worker that are mapped when its successor starts (0).
- `overdue`: pages that a borrower keeps, and lives, long after they were due (0).
- `homeless`: models that no device is to serve any more that takes requests (0).
- `stray`: requests given to a device without a worker while another one serves them, and KV sent to
  a worker that has not what it follows (0).
- `spares`: worlds that end without a spare worker or one to come, and spares that were taken
  though they had ended (0).
- `deaths`, `moved`: workers that died, and requests that migrated with their KV.
- `lent`, `kills`: pages lent, and workers that were killed because they did not return them.
- `hung`: spare workers that were killed because their preparation hung.
- `restarts`: servers that began after another had ended.

`--seeds 0:2500` runs a part of them. `--mutations` puts each old defect back
(`benchmarks.fault_mutations`), and prints the first seed that finds it.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ballast.core.errors import BrokenPromise
from benchmarks.common import finish, options
from benchmarks.fault_mutations import MUTATIONS, Mutation
from benchmarks.fault_world import FaultWorld

SEEDS, QUICK_SEEDS = 10_000, 500
WRONG = ("lost", "repeated", "changed", "leaked", "twice", "overdue", "homeless", "stray", "spares")


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
    hung: int
    restarts: int


def run(seed: int) -> Found:
    """Run one seed."""
    logging.disable(logging.CRITICAL)  # deaths and suspects are what it is about
    world = world_of(seed)
    world.run()
    moved = sum(device.moved_in for device in world.devices.values())
    wrong = {key: getattr(world, key) for key in WRONG}
    counts = len(world.clients), moved, world.lent, world.kills, world.reserve.hung
    return Found(seed, wrong, world.deaths, *counts, world.servers - 1)


def finding(mutation: Mutation, seeds: Iterable[int]) -> Found | None:
    """Return the first of `seeds` that shows a defect which has been put back; None: none does."""
    with mutation.put_back():
        for seed in seeds:
            try:
                found = run(seed)
            except (AssertionError, BrokenPromise) as error:
                return Found(seed, {type(error).__name__: 1}, 0, 0, 0, 0, 0, 0, 0)
            if any(found.wrong.values()):
                return found
    return None


def _find_all(n: int, name: str) -> bool:
    """Print which seeds find each defect; return whether all are found."""
    table = Table("defect put back", "decision", "seed", "shown by", title=name)
    missed = 0
    for mutation in MUTATIONS:
        found = finding(mutation, range(n))
        missed += found is None
        shown = [] if found is None else [key for key, n in found.wrong.items() if n]
        seed = "none" if found is None else str(found.seed)
        table.add_row(mutation.name, mutation.decision, seed, ", ".join(shown))
    Console().print(table)
    return not missed


def _part(text: str) -> range:
    """Parse `FIRST:END`."""
    first, end = map(int, text.split(":"))
    return range(first, end)


def main() -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, help="run one seed alone")
        parser.add_argument("--seeds", type=_part, metavar="FIRST:END", help="run these alone")
        parser.add_argument("--mutations", action="store_true", help="put old defects back")

    args = options(__doc__, extra=extra)
    if args.mutations:
        return 0 if _find_all(QUICK_SEEDS, "fleet_faults") else 1
    seeds = args.seeds or range(QUICK_SEEDS if args.quick else SEEDS)
    if args.seed is not None:
        seeds = range(args.seed, args.seed + 1)
    began = time.perf_counter()
    with ProcessPoolExecutor() as processes:
        found = list(processes.map(run, seeds, chunksize=20))
    failed = [f for f in found if any(f.wrong.values())]
    for f in failed:
        print(f"seed {f.seed}: {f.wrong}")
    results = {
        "seeds": len(found),
        "first": seeds.start,
        **{key: sum(f.wrong[key] for f in found) for key in WRONG},
        "deaths": sum(f.deaths for f in found),
        "requests": sum(f.requests for f in found),
        "moved": sum(f.moved for f in found),
        "lent": sum(f.lent for f in found),
        "kills": sum(f.kills for f in found),
        "hung": sum(f.hung for f in found),
        "restarts": sum(f.restarts for f in found),
        "wrong_seeds": [f.seed for f in failed],
        "seconds": time.perf_counter() - began,
    }
    finish(args, "fleet_faults", results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
