"""What layers that lend their memory to KV bring on this machine, over a link paced as GPUs' are.

Two random Llamas in bfloat16 in a memory of which KV gets a tenth, and bursts of requests that need
more (open loop, equal seeds). A link's pace is given as a ratio: a layer's copy over its part of a
decode step, of OPT-13b on GH200 and on an H100 with PCIe 5, as the paper would have it. Presets
run in turns, in one process; ratios are round by round
(medians, quartiles). `spatial`: jobs of both models in turn; `temporal`: models have turns.

- Presets that are compared have equal options (`contenders`): KV of both models in one pool, or in
  `shares`. `pool` is `recompute` with the one over `recompute` with the other.
- `overlap`: 1 - time that jobs waited for layers / time of copying them; of `mirage` at GH200's.
- P99 of TTFT is nearly the longest of a round's requests. `tbt` are all gaps between tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ballast.core.errors import ConfigError
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.contenders import SHARINGS, Comparison
from benchmarks.mirage_live_run import Seen, Served
from benchmarks.mirage_live_setting import LINKS, Setting, bursts, prepare, ratio_of

METRICS = ("throughput", "p99_ttft", "p99_tbt", "p50_tbt", "p99_tpot")
NOT_EVERYWHERE = ("kvswap",)
"""Presets that a live device may refuse; what they are compared in is null then."""
LOAD = 1.25
"""Of what could be served with memory enough: the hour of the peak."""


@dataclass(frozen=True)
class Variant:
    """A row of a comparison, on a link."""

    row: str
    sharing: str = "pool"
    link: str = "GH200"

    @property
    def comparison(self) -> Comparison:
        return SHARINGS[self.sharing]


PRESETS = "recompute", "mirage", "kvswap"
MAIN = {
    **{row: Variant(row) for row in PRESETS},
    **{f"{row}, shares": Variant(row, "shares") for row in PRESETS},
    "PCIe 5": Variant("mirage", link="PCIe 5"),
}
MANNERS = {"spatial": False, "temporal": True}
"""How models share the device: jobs of all in turn, or turns of their own."""


def base_of(name: str, variants: Mapping[str, Variant]) -> str | None:
    """The variant that one is compared with: `recompute` on its terms."""
    variant = variants[name]
    if variant.row == "recompute":
        return POOL_OVER if variant.sharing == "pool" and POOL_OVER in variants else None
    wanted = Variant("recompute", variant.sharing)
    return next((other for other, v in variants.items() if v == wanted), None)


POOL_OVER = "recompute, shares"
"""What `recompute` with one pool is compared with: the same without."""


@dataclass(frozen=True)
class Length:
    """How long it all takes."""

    rounds: int
    seconds: float
    """Of a round's arrivals."""
    variants: tuple[str, ...] | None = None
    """Those that run; None: all."""


FULL = Length(3, 4.0)
QUICK = Length(1, 3.0, ("recompute", "mirage", "kvswap"))


def run(
    setting: Setting, variants: Mapping[str, Variant], temporal: bool, rounds: int, seconds: float
) -> dict[str, list[Seen]]:
    """What each variant's clients saw, by round; without those that a device refuses."""
    rounds_of: dict[str, list[Seen]] = {}
    with ExitStack() as open_devices:

        def serve(name: str, served: Served) -> float:
            """The same requests for all variants of a round."""
            seed = len(rounds_of[name])
            seen = served.run(bursts(LOAD * setting.rate, seconds, seed))
            rounds_of[name].append(seen)
            return seen.clients.summary()["throughput"]

        ready = {}
        for name, variant in variants.items():
            comparison = variant.comparison.on(temporal=float(temporal))
            preset, chosen = comparison.rows[variant.row].preset, comparison.options(variant.row)
            ratio = ratio_of(LINKS[variant.link])
            try:
                served = Served(setting.under(preset, chosen, ratio))
            except ConfigError as refused:
                if preset not in NOT_EVERYWHERE:
                    raise
                Console().print(f"{name}: not there. {refused}")
                continue
            open_devices.callback(served.close)
            rounds_of[name] = []
            ready[name] = partial(serve, name, served)
        interleave(ready, rounds)
    return rounds_of


def over(of: Sequence[Seen], base: Sequence[Seen]) -> dict[str, Samples]:
    """Metrics of one variant over those of another, round by round."""
    values, others = ([s.clients.summary() for s in seen] for seen in (of, base))
    return {
        metric: Samples(tuple(s[metric] for s in values)).over(
            Samples(tuple(s[metric] for s in others))
        )
        for metric in METRICS
    }


def overlap(seen: Sequence[Seen]) -> float | None:
    """Part of the time of copying layers in which nothing waited; None: nothing was copied."""
    loads = [s.clients.loads for s in seen]
    copying = sum(x.copy_seconds for x in loads)
    return 1.0 - sum(x.stall_seconds for x in loads) / copying if copying else None


def summary(
    variants: Mapping[str, Variant], rounds_of: Mapping[str, Sequence[Seen]]
) -> dict[str, Any]:
    """Every run, and each variant's ratios to what it is compared with."""
    there = {name: variant for name, variant in variants.items() if name in rounds_of}
    bases = {name: base_of(name, there) for name in there}
    return {
        "runs": {name: [s.summary() for s in seen] for name, seen in rounds_of.items()},
        "overlap": {name: overlap(seen) for name, seen in rounds_of.items()},
        "compared_with": bases,
        "over": {
            name: {m: s.to_json() for m, s in over(rounds_of[name], rounds_of[base]).items()}
            for name, base in bases.items()
            if base is not None
        },
    }


def headlines(manners: Mapping[str, Mapping[str, Sequence[Seen]]]) -> dict[str, float | None]:
    """The claims' keys, with one pool: medians over the rounds of both manners; None where there is
    no such preset."""
    keys: dict[str, float | None] = {}
    for base in ("recompute", "kvswap"):
        there = [over(of["mirage"], of[base]) for of in manners.values() if base in of]
        for metric in METRICS[:3]:
            values = tuple(v for ratios in there for v in ratios[metric].values)
            keys[f"{metric}_over_{base}"] = Samples(values).median if values else None
    keys["overlap"] = overlap([s for of in manners.values() for s in of["mirage"]])
    return keys


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, metavar="N", help="of each pair (3; quick: 1)")

    args = options(__doc__, argv, extra)
    length = QUICK if args.quick else FULL
    rounds = args.rounds or length.rounds
    manners: dict[str, dict[str, list[Seen]]] = {}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch))
        chosen = {
            name: variant
            for name, variant in MAIN.items()
            if length.variants is None or name in length.variants
        }
        for manner, temporal in MANNERS.items():
            manners[manner] = run(setting, chosen, temporal, rounds, length.seconds)
            result[manner] = summary(chosen, manners[manner])
        result = {**headlines(manners), "setting": setting.to_json(), **result}
    finish(args, "mirage_live", result)


if __name__ == "__main__":
    main()
