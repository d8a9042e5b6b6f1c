"""What layers that lend their memory to KV bring on this machine, over a link paced as GPUs' are.

Two random Llamas in bfloat16 in a memory of which KV gets a tenth, and bursts of requests that need
more (open loop, equal seeds). A link's pace is given as a ratio: a layer's copy over its part of a
decode step, of OPT-13b on GH200 and on an H100 with PCIe 5, as the paper would have it; then from a
quarter of GH200's to four times it. Presets run in turns, in one process; ratios are round by round
(medians, quartiles). `spatial`: jobs of both models in turn; `temporal`: models have turns.

- `pooled`: `recompute` with one pool of KV for both models, which `mirage` has, too: what it gains
  beyond that comes from layers. `shares`: `mirage` with the fixed shares that `recompute` has.
- `overlap`: 1 - time that jobs waited for layers / time of copying them; of `mirage` at GH200's.
- `lru`, `beta1`, `uncapped`, `kept` are `mirage` with a part of it off, over `mirage`.
- `beside_copies`, `copying`: a copy takes a core here. One thread computes, so that it has the
  other, but both use the same memory: by how much a decode step is longer while such copies go on
  elsewhere. How `mirage` would do without that cannot be measured here. Where `copying` times
  the link's speed-up nears 1, in the sweep's fast links, it is the core that limits copies.
- P99 of TTFT is nearly the longest of a round's requests. `tbt` are all gaps between tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.core.errors import ConfigError
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.mirage_live_run import Seen, Served
from benchmarks.mirage_live_setting import LINKS, Setting, bursts, prepare, ratio_of

METRICS = ("throughput", "p99_ttft", "p99_tbt", "p50_tbt", "p99_tpot")
NOT_EVERYWHERE = ("kvswap",)
"""Presets that a live device may refuse; what they are compared in is null then."""
LOAD = 1.25
"""Of what could be served with memory enough: the hour of the peak."""


@dataclass(frozen=True)
class Variant:
    """A preset on a link."""

    preset: str
    options: Mapping[str, float] = field(default_factory=dict)
    link: str = "GH200"
    slower: float = 1.0
    """So many times the ratio."""


MAIN = {
    "recompute": Variant("recompute"),
    "mirage": Variant("mirage"),
    "kvswap": Variant("kvswap"),
    "pooled": Variant("recompute", {"pooled": 1}),
    "PCIe 5": Variant("mirage", link="PCIe 5"),
}
ABLATIONS = {
    "shares": Variant("mirage", {"pooled": 0}),
    "beta1": Variant("mirage", {"beta": 1}),
    "uncapped": Variant("mirage", {"cap": 0}),
    "kept": Variant("mirage", {"reversion": 0}),
}
SHARINGS: dict[str, dict[str, Variant]] = {
    "spatial": {**MAIN, **ABLATIONS},
    "temporal": {**MAIN, "lru": Variant("mirage", {"lru": 1})},
}
SWEEP = {
    "recompute": Variant("recompute"),
    **{f"x{slower:g}": Variant("mirage", slower=slower) for slower in (0.25, 0.5, 1, 2, 4)},
}


@dataclass(frozen=True)
class Length:
    """How long it all takes."""

    rounds: int
    seconds: float
    """Of a round's arrivals."""
    variants: tuple[str, ...] | None = None
    """Those that run; None: all."""
    sweep: bool = True


FULL = Length(3, 4.0)
QUICK = Length(1, 3.0, ("recompute", "mirage", "kvswap"), sweep=False)


def run(
    setting: Setting, variants: Mapping[str, Variant], temporal: bool, rounds: int, seconds: float
) -> dict[str, list[Seen]]:
    """What each variant's clients saw, by round; without those that a device refuses."""
    told: dict[str, list[Seen]] = {}
    with ExitStack() as open_devices:

        def serve(name: str, served: Served) -> float:
            """The same requests for all variants of a round."""
            seed = len(told[name])
            seen = served.run(bursts(LOAD * setting.rate, seconds, seed))
            told[name].append(seen)
            return seen.clients.summary()["throughput"]

        ready = {}
        for name, variant in variants.items():
            chosen = {**variant.options, "temporal": float(temporal)}
            ratio = variant.slower * ratio_of(LINKS[variant.link])
            try:
                served = Served(setting.under(variant.preset, chosen, ratio))
            except ConfigError as refused:
                if variant.preset not in NOT_EVERYWHERE:
                    raise
                Console().print(f"{name}: not there. {refused}")
                continue
            open_devices.callback(served.close)
            told[name] = []
            ready[name] = partial(serve, name, served)
        interleave(ready, rounds)
    return told


def over(told: Mapping[str, Sequence[Seen]], base: str) -> dict[str, dict[str, Samples]]:
    """Each variant's metrics over those of `base`, round by round."""
    values = {name: [s.clients.summary() for s in seen] for name, seen in told.items()}
    samples = {
        name: {metric: Samples(tuple(s[metric] for s in of)) for metric in METRICS}
        for name, of in values.items()
    }
    return {
        name: {metric: samples[name][metric].over(samples[base][metric]) for metric in METRICS}
        for name in samples
        if name != base
    }


def overlap(seen: Sequence[Seen]) -> float | None:
    """Part of the time of copying layers in which nothing waited; None: nothing was copied."""
    loads = [s.clients.loads for s in seen]
    copying = sum(x.copy_seconds for x in loads)
    return 1.0 - sum(x.stall_seconds for x in loads) / copying if copying else None


def summary(told: Mapping[str, Sequence[Seen]]) -> dict[str, Any]:
    """Of one sharing: every run, and the ratios."""
    result: dict[str, Any] = {
        "runs": {name: [s.summary() for s in seen] for name, seen in told.items()},
        "overlap": {name: overlap(seen) for name, seen in told.items()},
    }
    for base in ("recompute", "mirage"):
        if base in told:
            result[f"over_{base}"] = {
                name: {metric: s.to_json() for metric, s in ratios.items()}
                for name, ratios in over(told, base).items()
            }
    return result


def headlines(sharings: Mapping[str, Mapping[str, Sequence[Seen]]]) -> dict[str, float | None]:
    """The claims' keys: medians over the rounds of both sharings; None where there is no such
    preset."""
    keys: dict[str, float | None] = {}
    for base in ("recompute", "kvswap"):
        there = [over(told, base)["mirage"] for told in sharings.values() if base in told]
        for metric in METRICS[:3]:
            values = tuple(v for ratios in there for v in ratios[metric].values)
            keys[f"{metric}_over_{base}"] = Samples(values).median if values else None
    keys["overlap"] = overlap([s for told in sharings.values() for s in told["mirage"]])
    return keys


def add_rows(table: Table, sharing: str, told: Mapping[str, Sequence[Seen]]) -> None:
    """A row for each variant: its ratios to `recompute`, and what it did for them."""
    table.add_section()
    table.add_row(f"[bold]{sharing}")
    ratios = over(told, "recompute")
    for name, seen in told.items():
        of = ratios.get(name)
        cells = [_ratio(of[metric]) if of else "1" for metric in METRICS[:3]]
        preempted = sum(s.clients.preemptions for s in seen)
        lent = sum(s.lent for s in seen) / len(seen)
        hidden = overlap(seen)
        table.add_row(
            name,
            *cells,
            str(preempted),
            f"{lent:.1f}",
            "" if hidden is None else f"{hidden:.3f}",
        )


def _ratio(samples: Samples) -> str:
    low, high = samples.spread
    return f"{samples.median:.2f} ({low:.2f}-{high:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, metavar="N", help="of each pair (3; quick: 1)")

    args = options(__doc__, argv, extra)
    length = QUICK if args.quick else FULL
    rounds = args.rounds or length.rounds
    table = Table(
        "variant",
        "throughput",
        "P99 TTFT",
        "P99 TBT",
        "preempted",
        "lent",
        "overlap",
        title="over recompute: median (quartiles)",
    )
    sharings: dict[str, dict[str, list[Seen]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch))
        Console().print(", ".join(f"{key} {value:.4g}" for key, value in setting.to_json().items()))
        for sharing, all_variants in SHARINGS.items():
            chosen = {
                name: variant
                for name, variant in all_variants.items()
                if length.variants is None or name in length.variants
            }
            told = run(setting, chosen, sharing == "temporal", rounds, length.seconds)
            sharings[sharing] = told
            add_rows(table, sharing, told)
        result: dict[str, Any] = {**headlines(sharings), "setting": setting.to_json()}
        result |= {sharing: summary(told) for sharing, told in sharings.items()}
        if length.sweep:
            told = run(setting, SWEEP, False, 1, length.seconds)
            add_rows(table, "link", told)
            result["link"] = summary(told)
    finish(args, "mirage_live", result, table)


if __name__ == "__main__":
    main()
