"""How far placements are from the least KV pressure there can be: Prism's greedy, and ours.

200 random problems of 5 to 9 devices of 80 GB and twice as many models, and 20 of 32 devices and 58
models: Prism's sizes (43 of 1B to 3B, 8 of 4B to 8B, 3 of 9B to 30B, 4 of 31B to 70B), the largest
spread over 4 or 8 devices. Rates are drawn log-normally, in turns with a spread of 0.3, 0.7 and
1.2: where models are of very different popularity, the most popular one alone decides. Half of the
problems of either kind know where models are now, as an earlier placement left them.

`small_gap`, `large_gap`: the mean over problems of the highest KVPR over the proven lower bound,
less 1, of `optimal`; `greedy_small_gap`, `greedy_large_gap`: of `greedy`, over the same bounds.
`large_seconds_max`: the longest that `optimal` took. `proven`: the share of problems in which the
answer is proven to lie within `policy.fleet.optimal_placement.GAP` of the optimum.

`published_score`: 1 / mean of the highest KVPR over the 50 seeded problems of the placement
benchmark that Prism's authors have published (the optimum there: 25.26; Algorithm 1: 20.89);
`published_score_greedy`, `published_score_before`: of the greedy, that gives a model to the device
with the least resulting KVPR, as the text has it, or with the least before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ballast.policy.fleet.kv_pressure import DeviceFill, KvDemand, greedy, max_pressure, moved
from ballast.policy.fleet.optimal_placement import GAP, optimal
from ballast.policy.fleet.placement_problem import PlacementDevice
from benchmarks.common import finish, options, verdict

SMALL, LARGE, PUBLISHED = 200, 20, 50
MEMORY = 80.0
"""Of a device, in GB."""
SIZES = ((43, 1.0, 3.0), (8, 4.0, 8.0), (3, 9.0, 30.0), (4, 31.0, 70.0))
"""Models of the large problems, and their billions of parameters, from and to."""
SPREADS = (0.3, 0.7, 1.2)
"""Of the logarithm of models' rates."""
GOALS = {"small_gap": 0.001, "large_gap": 0.02, "large_seconds_max": 5.0}


@dataclass(frozen=True)
class Problem:
    claims: list[KvDemand]
    devices: list[PlacementDevice]


def small(seed: int) -> Problem:
    """5 to 9 devices, twice as many models of 10 to 30 GB."""
    rng = np.random.default_rng([seed, 1])
    n = int(rng.integers(5, 10))
    claims = [
        KvDemand(f"m{i}", float(rng.uniform(10, 30)), demand(rng, seed)) for i in range(2 * n)
    ]
    return _placed(claims, n, rng, seed)


def large(seed: int) -> Problem:
    """32 devices, 58 models; from 31B on a model is spread over 4, from 50B on over 8 devices."""
    rng = np.random.default_rng([seed, 2])
    claims: list[KvDemand] = []
    for n, least, most in SIZES:
        for _ in range(n):
            billions = float(rng.uniform(least, most))
            parts = 8 if billions > 50 else 4 if billions > 30 else 1
            claims.append(KvDemand(f"m{len(claims)}", 2 * billions, demand(rng, seed), parts))
    return _placed(claims, 32, rng, seed)


def demand(rng: np.random.Generator, seed: int) -> float:
    """Tokens per second over seconds per token."""
    spread = SPREADS[seed % len(SPREADS)]
    return float(rng.lognormal(5.0, spread) / rng.uniform(0.02, 0.1))


def _placed(claims: list[KvDemand], n: int, rng: np.random.Generator, seed: int) -> Problem:
    """Every other problem's models are where the greedy put them for other rates."""
    devices = [PlacementDevice(f"d{i}", MEMORY) for i in range(n)]
    if seed % 2:
        before = greedy([c._replace(demand=demand(rng, seed)) for c in claims], devices)
        claims = [c._replace(devices=before[c.name]) for c in claims]
    return Problem(claims, devices)


@dataclass(frozen=True)
class Solved:
    greedy: float
    """Over the lower bound, less 1; so is `ours`."""
    ours: float
    seconds: float
    moved: tuple[float, float]
    """GB, by the greedy and by us, of models that were somewhere."""


def solve(problem: Problem) -> Solved:
    claims, devices = problem.claims, problem.devices
    began = time.perf_counter()
    found = optimal(claims, devices)
    seconds = time.perf_counter() - began
    first = greedy(claims, devices)
    bound = found.lower_bound
    weights = {c.name: c.part_weights for c in claims}

    def gigabytes(homes: dict[str, tuple[str, ...]]) -> float:
        return sum(len(to) * weights[name] for name, to in moved(claims, homes).items())

    return Solved(
        max_pressure(claims, devices, first) / bound - 1,
        found.max_kvpr / bound - 1,
        seconds,
        (gigabytes(first), gigabytes(dict(found.homes))),
    )


def summary(kind: str, solved: Sequence[Solved]) -> dict[str, float]:
    moving = [s for s in solved if any(s.moved)]
    return {
        f"{kind}_gap": fmean(s.ours for s in solved),
        f"greedy_{kind}_gap": fmean(s.greedy for s in solved),
        f"{kind}_gap_max": max(s.ours for s in solved),
        f"{kind}_seconds_mean": fmean(s.seconds for s in solved),
        f"{kind}_seconds_max": max(s.seconds for s in solved),
        f"{kind}_proven": fmean(s.ours <= GAP for s in solved),
        f"{kind}_moved_gb": fmean(s.moved[1] for s in moving) if moving else 0.0,
        f"greedy_{kind}_moved_gb": fmean(s.moved[0] for s in moving) if moving else 0.0,
    }


def published(n: int) -> list[Problem]:
    """The first `n` of the 50 problems, as that benchmark draws them."""
    rng = np.random.RandomState(42)
    found = []
    for _ in range(n):
        devices = [PlacementDevice(f"d{i}", MEMORY) for i in range(rng.randint(5, 10))]
        claims = []
        for i in range(2 * len(devices)):
            size, rate, slo = rng.randint(10, 30), rng.randint(1, 10), rng.randint(5, 10)
            claims.append(KvDemand(f"m{i:02}", float(size), rate / slo))
        found.append(Problem(claims, devices))
    return found


def by_pressure_before(problem: Problem) -> float:
    """The highest KVPR where each model goes to the device with the least before it comes."""
    held = [DeviceFill(d) for d in problem.devices]
    for c in sorted(problem.claims, key=lambda c: -c.demand):
        fits = [i for i, f in enumerate(held) if f.weights + c.weights < f.device.memory]
        i = min(fits, key=lambda i: held[i].pressure)
        held[i] = held[i].with_part(c)
    return max(f.pressure for f in held)


def scores(problems: Sequence[Problem]) -> dict[str, float]:
    """1 / the mean of the highest KVPRs."""
    ours = [optimal(p.claims, p.devices).max_kvpr for p in problems]
    first = [max_pressure(p.claims, p.devices, greedy(p.claims, p.devices)) for p in problems]
    return {
        "published_score": 1 / fmean(ours),
        "published_score_greedy": 1 / fmean(first),
        "published_score_before": 1 / fmean(map(by_pressure_before, problems)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    counts = (20, 4) if args.quick else (SMALL, LARGE)
    result: dict[str, object] = {"problems": counts}
    for kind, make, n in (("small", small, counts[0]), ("large", large, counts[1])):
        result |= summary(kind, [solve(make(seed)) for seed in range(n)])
    result |= scores(published(counts[0] if args.quick else PUBLISHED))
    result["goals"] = {
        key: verdict(float(str(result[key])), at_most=goal) for key, goal in GOALS.items()
    }
    finish(args, "placement", result)


if __name__ == "__main__":
    main()
