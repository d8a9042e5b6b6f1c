"""How well equations 4 and 5 of MIRAGE say which copies of layers are hidden, against the timeline.

Nothing is run: all figures follow from `ballast.core.rotation`, in units of one layer's compute
time, `c`. `t` is the time of one layer's copy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.core.rotation import WHOLE, Rotation, best, most, single, spread, stall
from benchmarks.common import finish, options

LAYERS = 40
ALPHAS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 18)
MOST_LAYERS = 48
LAYER_GB = 12 * 5120**2 * 2 / 1e9
"""OPT-13b in 16 bits."""
LINKS = {"GH200, 427 GB/s": 427.0, "PCIe 5, 55 GB/s": 55.0}
STEPS = (0.01, 0.02, 0.04, 0.2)


def longest(n: int, alpha: int, slots: int | None, outside: float = 0.0) -> float:
    """The longest copy that some plan hides; to 1e-6 of a layer."""
    low, high = 0.0, 2.0 * n
    while high - low > 1e-6:
        middle = (low + high) / 2
        plan = best(n, tuple(range(n)), alpha, middle, 1.0, outside, slots=slots)
        if plan is not None and stall(n, plan, middle, 1.0, outside) == 0.0:
            low = middle
        else:
            high = middle
    return low


def bounds(n: int, alphas: Sequence[int]) -> list[dict[str, float]]:
    return [
        {
            "alpha": alpha,
            "equation_4": (n - alpha - 1) / (alpha + 1),
            "one_slot": longest(n, alpha, 1),
            "equation_5": n / (alpha + 2),
            "two_slots": longest(n, alpha, 2),
            "two_slots_outside_1": longest(n, alpha, 2, outside=1.0),
            "any": longest(n, alpha, None),
        }
        for alpha in alphas
    ]


def looseness(most_layers: int) -> dict[str, Any]:
    """All models of up to so many layers, every alpha whose slots are two layers apart and more."""
    one = [(n, alpha) for n in range(2, most_layers + 1) for alpha in range(1, n // 2)]
    two = [(n, alpha) for n, alpha in one if alpha >= 2 and 2 * (alpha + 2) <= n]
    over_4 = [((n - a - 1) / (a + 1)) / (n // (a + 1) - 1) - 1 for n, a in one]
    over_5 = [(n / (a + 2)) / ((n - a % 2) / (a + 2)) - 1 for n, a in two]
    return {
        "equation_4": {
            "plans": len(one),
            "promise_too_much": sum(x > 1e-9 for x in over_4),
            "largest_excess": max(over_4),
        },
        "equation_5": {
            "plans": len(two),
            "promise_too_much": sum(x > 1e-9 for x in over_5),
            "largest_excess": max(over_5),
        },
    }


def examples() -> dict[str, Any]:
    every = tuple(range(LAYERS))

    def slowdown(alpha: int, transfer: float, slots: int | None) -> float:
        plan = best(LAYERS, every, alpha, transfer, 1.0, slots=slots)
        assert plan is not None
        return stall(LAYERS, plan, transfer, 1.0) / LAYERS

    even = Rotation(spread(LAYERS, every, 11), 2)
    nine = [
        k / 1000
        for k in range(2500, 4000)
        if not single(LAYERS, 9, k / 1000, 1.0) and single(LAYERS, 8, k / 1000, 1.0)
    ]
    return {
        "layers_1_and_5_of_8": stall(8, Rotation((0, 4), 1), 3.0, 1.0) / 8,
        "layers_1_and_8_of_8": stall(8, Rotation((0, 7), 1), 3.0, 1.0) / 8,
        "five_looser_from_alpha": next(
            a for a in range(1, LAYERS) if LAYERS / (a + 2) > (LAYERS - a - 1) / (a + 1)
        ),
        "nine_is_the_first_for_t": [min(nine), max(nine)],
        "cap_on_m": {"alpha": most(LAYERS, every, 4.0, float(LAYERS))},
        "cap_on_alpha": {"alpha": 10, "slowdown": slowdown(10, 4.0, None)},
        "one_slot_always": {f"alpha {a}": slowdown(a, LAYERS / (a + 2), 1) for a in (2, 4, 8, 10)},
        "third_slot": {f"{k} slots": slowdown(29, 1.25, k) for k in (1, 2, 3)},
        "odd_m_at_equation_5": slowdown(9, LAYERS / 11, 2),
        "odd_m_a_layer_less": {
            "even": stall(LAYERS, even, 3.545, 1.0) / LAYERS,
            "best": slowdown(9, 3.545, 2),
        },
    }


def capped() -> dict[str, dict[str, int]]:
    """The most layers of OPT-13b to lend, by link and seconds of a pass."""
    every = tuple(range(LAYERS))
    return {
        link: {f"{1e3 * step:.0f} ms": most(LAYERS, every, LAYER_GB / rate, step) for step in STEPS}
        for link, rate in LINKS.items()
    }


def walk(n: int, transfer: float, keep: bool, changes: int, seed: int = 7) -> float:
    """Layers that begin or cease to rotate, per change of alpha by one or two; the mean."""
    rng, every = random.Random(seed), tuple(range(n))
    top = most(n, every, transfer, float(n))
    now, alpha = WHOLE, 0
    moved: list[int] = []
    while len(moved) < changes:
        wanted = min(top, max(0, alpha + rng.choice((-2, -1, 1, 2))))
        if wanted == alpha:
            continue
        plan = best(n, every, wanted, transfer, 1.0, now=now if keep else WHOLE)
        assert plan is not None
        if alpha and wanted:
            moved.append(len(set(now.layers) ^ set(plan.layers)))
        now, alpha = plan, wanted
    return sum(moved) / len(moved)


def walks(changes: int) -> list[dict[str, float]]:
    return [
        {
            "layers": n,
            "t": t,
            "kept": walk(n, t, True, changes),
            "anew": walk(n, t, False, changes),
        }
        for n in (32, 40, 80)
        for t in (1.0, 2.0, 4.0)
    ]


def tabled(title: str, rows: Sequence[dict[str, float]]) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    rows = bounds(LAYERS, ALPHAS[::3] if args.quick else ALPHAS)
    moved = walks(50 if args.quick else 300)
    result = {"examples": examples(), "looseness": looseness(MOST_LAYERS), "capped": capped()}
    Console().print(tabled(f"longest hidden copy, t / c, of {LAYERS} layers", rows))
    Console().print(tabled("layers changed per change of plan", moved))
    finish(args, "rotation_plans", {**result, "bounds": rows, "walks": moved})


if __name__ == "__main__":
    main()
