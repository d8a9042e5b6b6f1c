"""Prism's settings in virtual time (`prism_setting` says what is equal for all rows, and why).

- `eighteen` (section 7.2): 18 models of 1B to 8B; the fewest of one to eight H100s on which TTFT
  and TPOT are in time for 99 % of the requests each. `devices_prism`, `devices_static` and so on:
  means over seeds (None: eight are not enough for one of them), with the least and the most.
- `fiftyeight` (section 7.4): 58 models of Table 3 on 12 to 32 H100s, the largest in tensor-parallel
  groups of 4 and 8, the groups being alike for all rows; keys `fiftyeight_devices_...`.
- `memory`: `eighteen` with prompts and outputs several times as long, so that KV is short on few
  devices; keys `memory_devices_...`.
- `eight` (section 7.2): eight models of 1B to 14B on two H100s: the part in time by the size of
  clumps of requests, and the largest factor up to which 99 % are in time. `prism, 45 s` evicts
  models that nobody has asked for 45 s, beside by need, as the paper does; `prism, by weights`
  leaves models where they are.
- `sensitivity` (appendix A.4): the same models under other idle thresholds, other windows in which
  rates are measured, other gains above which a model migrates, and other rounds of the controller.

A run that cannot attain 99 % any more is cut short in searches. Virtual time: equal options give
equal results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from rich.console import Group, RenderableType
from rich.table import Table

from ballast.core import traffic
from ballast.policy.fleet.migrate import LeastPressure
from ballast.sim.cluster_files import NO_FILES, ClusterFiles
from benchmarks.common import finish, options
from benchmarks.prism_setting import (
    COMPARED,
    EIGHT,
    EIGHTEEN,
    GROUPED,
    TARGET,
    Result,
    Setting,
    by_size,
    measure,
    whole,
)
from benchmarks.rate_curves import Curve
from benchmarks.sweep import Sweep, add_processes, plain

SEARCHED = ("static", "muxserve", "swap", "balloon", "prism")
FACTORS = (1.0, 4.0, 8.0)
"""On the requests of a clump, for `eight`."""
IDLES = (5.0, 15.0, 45.0, 120.0, None)
"""Seconds; None: by need alone."""
WINDOWS = (10.0, 60.0, 240.0)
GAINS = (0.0, 0.2, 0.5)
ROUNDS = (2.0, 10.0, 30.0)
"""Seconds between two looks of the controller."""


@dataclass(frozen=True)
class Search:
    """The fewest devices for 99 %."""

    title: str
    setting: Setting
    layouts: Mapping[int, str]
    """By number of GPUs, in ascending order, the devices."""
    stated: Mapping[str, str]
    """What the paper states, by row."""

    def fewest(self, row: str, seed: int) -> tuple[int | None, dict[int, Result]]:
        """GPUs with which TTFT and TPOT are in time for 99 % each, and all that was tried: the most
        that there are to the end, fewer as far as they can attain it."""
        tried: dict[int, Result] = {}
        numbers = list(self.layouts)

        def enough(i: int) -> bool:
            n, last = numbers[i], i == len(numbers) - 1
            tried[n] = measure(self.setting, row, self.layouts[n], seed, cut=not last)
            return tried[n].both >= TARGET

        low, high = -1, len(numbers) - 1
        if not enough(high):
            return None, tried
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return numbers[high], tried


SEARCHES = {
    "eighteen": Search(
        "18 models",
        Setting(EIGHTEEN, seconds=60.0, clumps=10.0),
        {n: whole(n) for n in range(1, 9)},
        {"prism": "4, 5", **dict.fromkeys(("static", "muxserve", "swap"), "over 8")},
    ),
    "fiftyeight": Search(
        "58 models",
        Setting(by_size(), seconds=60.0),
        GROUPED,
        {"prism": "16", "muxserve": "32", "static": "over 32", "swap": "over 32"},
    ),
    "memory": Search(
        "18 models, 5 x as long",
        Setting(EIGHTEEN, seconds=60.0, clumps=4.0, longer=5.0, context=8192),
        {n: whole(n) for n in range(1, 9)},
        {},
    ),
}


def summary_of(found: Sequence[int | None]) -> dict[str, Any]:
    """Of one row, over seeds."""
    known = [n for n in found if n is not None]
    if len(known) < len(found):
        return {"mean": None, "least": min(known, default=None), "most": None}
    return {"mean": fmean(known), "least": min(known), "most": max(known)}


def searched(
    name: str, search: Search, rows: Sequence[str], seeds: Sequence[int], sweep: Sweep
) -> tuple[dict[str, Any], RenderableType]:
    """A part's result and its table."""
    by_seed = sweep.over((rows, seeds), search.fewest)
    found = {row: [*of.values()] for row, of in by_seed.items()}
    most = list(search.layouts)[-1]
    over = f"over {most}"
    columns = ("GPUs for 99 %", "from - to", "the paper's", f"TTFT, TPOT with {most}", "tried")
    table = Table("", *columns, title=search.title)
    devices = {row: summary_of([n for n, _ in of]) for row, of in found.items()}
    for row, of in found.items():
        outcome = devices[row]
        at_most = [tried[most] for _, tried in of]
        shown = ", ".join(f"{fmean(getattr(r, w) for r in at_most):.1%}" for w in ("ttft", "tpot"))
        table.add_row(
            row,
            over if outcome["mean"] is None else f"{outcome['mean']:.1f}",
            f"{outcome['least'] or over} - {outcome['most'] or over}",
            search.stated.get(row, ""),
            shown,
            "; ".join(" ".join(f"{n}:{_share(r)}" for n, r in sorted(t.items())) for _, t in of),
        )
    prefix = "" if name == "eighteen" else f"{name}_"
    result = {
        **{f"{prefix}devices_{row}": outcome["mean"] for row, outcome in devices.items()},
        name: {
            "devices": devices,
            "setting": asdict(search.setting),
            "tried": {row: [_tried(t) for _, t in of] for row, of in found.items()},
        },
    }
    return result, table


def _share(r: Result) -> str:
    """The lower of both attainments; an upper bound where the run was cut short."""
    return f"{r.both:.1%}" if r.complete else f"<{TARGET:.0%}"


def curves(
    setting: Setting, seeds: Sequence[int], sweep: Sweep
) -> tuple[dict[str, Any], RenderableType]:
    """`eight`: all rows, by the size of clumps."""
    results = sweep.over((COMPARED.rows, FACTORS, seeds), partial(clumped, setting))
    found = {row: {f: [*of.values()] for f, of in by.items()} for row, by in results.items()}
    columns = (*(f"{f:g} x" for f in FACTORS), "99 % up to")
    table = Table("", *columns, title="eight models on two devices: in time; moves")
    at = {}
    for row, by in found.items():
        at[row] = Curve({f: fmean(r.both for r in of) for f, of in by.items()}).rate_at(TARGET)
        cells = (
            f"{fmean(r.both for r in of):.1%}; {fmean(r.moves for r in of):g}" for of in by.values()
        )
        table.add_row(row, *cells, f"{at[row]:.2f} x")
    return {"factor_at_99": at, "eight": plain(found)}, table


def clumped(setting: Setting, row: str, factor: float, seed: int) -> Result:
    """A row with clumps of so many times the requests."""
    return measure(replace(setting, clumps=factor), row, whole(2), seed)


def under(
    setting: Setting,
    seed: int,
    idle: float | None,
    window: float,
    moving: Mapping[str, float] = MappingProxyType({}),
) -> Result:
    """`prism` with another idle threshold, another window of rates, and other settings of what
    moves models (`LeastPressure`)."""
    files = ClusterFiles(homes=LeastPressure(**moving)) if moving else NO_FILES
    with patch.object(traffic, "WINDOW", window):
        return measure(setting, "prism", whole(2), seed, ttl=idle, files=files)


Variant = tuple[float | None, float, dict[str, float]]
"""Idle threshold, window and settings of moves, as `under` has them."""


def varied(setting: Setting, variants: Mapping[str, Variant], name: str, seed: int) -> Result:
    """A variant by its name."""
    return under(setting, seed, *variants[name])


def sensitivity(
    setting: Setting, seeds: Sequence[int], sweep: Sweep
) -> tuple[dict[str, Any], RenderableType]:
    """A.4's parameters, one at a time."""
    variants: dict[str, Variant] = {
        **{f"idle {'by need' if i is None else f'{i:g} s'}": (i, 60.0, {}) for i in IDLES},
        **{f"window {w:g} s": (None, w, {}) for w in WINDOWS},
        **{f"gain {g:.0%}": (None, 60.0, {"threshold": g}) for g in GAINS},
        **{f"round {r:g} s": (None, 60.0, {"every": r}) for r in ROUNDS},
    }
    results = sweep.over((variants, seeds), partial(varied, setting, variants))
    found = {name: [*of.values()] for name, of in results.items()}
    table = Table("", "mean TTFT", "in time", "activations", "moves", title="sensitivity")
    for name, of in found.items():
        table.add_row(
            name,
            f"{1e3 * fmean(r.mean_ttft for r in of if r.mean_ttft is not None):.0f} ms",
            f"{fmean(r.both for r in of):.1%}",
            f"{fmean(r.activations for r in of):g}",
            f"{fmean(r.moves for r in of):g}",
        )
    return {"sensitivity": plain(found)}, table


def main(argv: Sequence[str] | None = None) -> None:
    parts = (*SEARCHES, "eight", "sensitivity")

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--part", choices=parts, nargs="+", default=parts)
        parser.add_argument("--rows", choices=SEARCHED, nargs="+", default=SEARCHED)
        parser.add_argument("--seconds", type=float, help="of requests; default 60, quick 30")
        parser.add_argument("--seeds", type=int, help="default 2, quick 1")
        parser.add_argument("--clumps", type=float, help="requests of a clump, times 3")
        parser.add_argument("--scale", type=float, default=1.0, help="of all service levels")
        parser.add_argument("--every", type=float, help="seconds between rounds of migration")
        parser.add_argument("--no-floor", action="store_true", help="levels shorter than Prism's")
        add_processes(parser)

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (30.0 if args.quick else 60.0)
    seeds = range(args.seeds or (1 if args.quick else 2))
    terms: dict[str, Any] = {"seconds": seconds, "scale": args.scale, "every": args.every}
    terms["floor"] = not args.no_floor
    if args.clumps is not None:
        terms["clumps"] = args.clumps
    eight = replace(Setting(EIGHT, seconds, clumps=8.0), **terms)
    result: dict[str, Any] = {"seeds": len(seeds), **terms}
    tables = []
    with Sweep(args.processes) as sweep:
        run: dict[str, Callable[[], tuple[dict[str, Any], RenderableType]]] = {
            "eight": lambda: curves(eight, seeds, sweep),
            "sensitivity": lambda: sensitivity(eight, seeds, sweep),
        }
        for part in args.part:
            if part in SEARCHES:
                of = SEARCHES[part]
                search = replace(of, setting=replace(of.setting, **terms))
                found, table = searched(part, search, args.rows, seeds, sweep)
            else:
                found, table = run[part]()
            result.update(found)
            tables.append(table)
    finish(args, "prism_sim", result, Group(*tables))


def _tried(results: Mapping[int, Result]) -> dict[str, Any]:
    return {str(n): asdict(r) for n, r in sorted(results.items())}


if __name__ == "__main__":
    main()
