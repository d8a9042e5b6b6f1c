"""Statistics of generated workloads, beside what the papers state of production traces.

`bursty_groups` for two hours, by default options, with 16 to 129 models: least and greatest over
models and seeds of what Prism's appendix A.1 states. Then how many of the requests a fifth of the
models get under MuxServe's power law. Nothing is timed: equal seeds give equal figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from ballast.workload.bursty import bursty_groups
from ballast.workload.generators import power_law
from benchmarks.common import finish, options

MODELS = 16, 24, 58, 129
SEEDS = 4
HOURS = 2.0
FIGURES = "active_share", "switches_per_hour", "idle_per_hour", "volatile_share"
"""Share of the models that had a request within two minutes; changes of that set; intervals of more
than 10 s without a request, by model; share of the models whose requests per minute have a CV above
1."""
STATED = "0.23-0.50", "54-766", "40-100 for many models", "many models"
ALPHAS = 0.9, 2.1
SIZES = 19, 10
"""Models under the power law."""


def runs(models: Sequence[int], seeds: int) -> Iterator[tuple[float, ...]]:
    for n in models:
        for seed in range(seeds):
            stats = bursty_groups([f"m{i}" for i in range(n)], 3600.0 * HOURS, seed=seed).stats()
            active = stats.active
            yield active.share, active.switches_per_hour, stats.idle_per_hour, stats.volatile


def fifth(n: int, alpha: float) -> float:
    """Share of the requests that go to the most popular fifth of `n` models, rounded up."""
    return sum(power_law(n, alpha)[: -(-n // 5)])


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    models, seeds = (MODELS[:2], 1) if args.quick else (MODELS, SEEDS)
    ranges = {
        name: {"least": min(values), "greatest": max(values)}
        for name, values in zip(FIGURES, zip(*runs(models, seeds), strict=True), strict=True)
    }
    fifths = {f"{n}_models": {f"{a:g}": fifth(n, a) for a in ALPHAS} for n in SIZES}
    table = Table("", "stated", "least", "greatest", title=f"{models} models, {seeds} seeds")
    for (name, of), stated in zip(ranges.items(), STATED, strict=True):
        table.add_row(name, stated, f"{of['least']:.3g}", f"{of['greatest']:.3g}")
    for name, of in fifths.items():
        table.add_row(f"a fifth of {name}", "0.5, 0.9", *(f"{of[f'{a:g}']:.2f}" for a in ALPHAS))
    finish(args, "generators", {"bursty": ranges, "power_law_fifth": fifths}, table)


if __name__ == "__main__":
    main()
