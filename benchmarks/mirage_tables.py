"""Tables of `docs/mirage-*.md`, from what `mirage_sim` and `mirage_live` wrote.

python -m benchmarks.mirage_tables out/mirage_sim.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import doc_tables
from benchmarks.doc_tables import markdown, ratio, row_of
from benchmarks.mirage_paper import CLAIMS

GROUPS = {
    "temporal_c1": "C1, in turns",
    "temporal_c2": "C2, in turns",
    "rates_c2": "C2, rates 3:1 and 1:3",
    "inputs_c2": "C2, long and short inputs",
    "mps_c1": "C1, side by side",
    "mig_c1": "C1, sliced",
    "alone": "OPT-13b alone",
}
VARIANTS = {
    "mig_c1_link": "C1, sliced, each with the whole link",
    "reversion": "OPT-13b alone, after the peak",
}
"""Groups that only sweeps run."""
METRICS = {
    "throughput": "throughput",
    "p99_ttft": "P99 TTFT",
    "p99_tbt": "P99 TBT",
}
SWEPT = {**METRICS, "p50_tbt": "P50 TBT"}
COLUMNS = {
    "layers": "layers, in one pool",
    "layers_shares": "layers, in fixed shares",
    "layers_paper": "layers, as the paper's own baseline",
    "pool": "the pool",
    "no_shortage": "no shortage",
}
Json = Mapping[str, Any]


def tables(result: Json) -> dict[str, str]:
    """Tables of the documentation in a result of `mirage_sim`, by name."""
    return {"mirage_sim.recompute": against_recomputation(result["curves"])}


def multiples(curves: Json) -> str:
    """The rates that a cell's figures are at."""
    return " · ".join(f"{m:g}" for m in next(iter(curves.values()))["multiples"])


def stated(group: str, metric: str) -> str:
    """What the paper says of a group, if it does."""
    claims = (c for c in CLAIMS if (c.group, c.metric, c.over) == (group, metric, "recompute"))
    return next((ratio(c.stated) for c in claims), "")


def against_recomputation(curves: Json) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for metric, title in METRICS.items():
            yield [f"**{title}**, at {multiples(curves)} times the knee", *[""] * 5]
            for group, curve in curves.items():
                over = curve["over"]
                cells = (row_of(over[c][metric]) if c in over else "" for c in COLUMNS)
                yield [GROUPS[group], stated(group, metric), *cells]

    return markdown(["", "the paper", *COLUMNS.values()], rows())


def sweep_table(sweep: Json) -> str:
    """Ratios of each row to the first row of its sweep."""

    def rows() -> Iterator[Sequence[str]]:
        for label, of in sweep.items():
            for row, cell in of.items():
                name = "no shortage" if row == "ample" else f"`{row}`"
                if "throughput" in cell:  # else the first row itself
                    yield [f"{_named(label)}: {name}", *(ratio(cell[m]) for m in SWEPT)]

    return markdown(["", *SWEPT.values()], rows())


def _named(label: str) -> str:
    group, space, rest = label.partition(" ")
    group, comma, _ = group.partition(",")
    return f"{(GROUPS | VARIANTS)[group]}{comma}{space}{rest}"


def paper(result: Json) -> list[dict[str, Any]]:
    """The claims over recomputation and swapping, each beside the curve of what it speaks of."""
    found = []
    for claim in CLAIMS:
        curve = result["curves"].get(claim.group)
        if curve is None or claim.over not in ("recompute", "kvswap"):
            continue
        of = curve["settings"][claim.setting] if claim.setting else curve
        name = "layers" if claim.over == "recompute" else "kvswap"
        found.append(
            {
                "section": claim.section,
                "text": claim.text,
                "metric": claim.metric,
                "stated": claim.stated,
                "multiples": curve["multiples"],
                "ours": of["over"][name][claim.metric],
            }
        )
    return found


def live(result: Json) -> dict[str, str]:
    """The table of a result of `mirage_live`."""

    def rows() -> Iterator[Sequence[str]]:
        for manner, title in (("spatial", "side by side"), ("temporal", "in turns")):
            of = result[manner]
            for name, over in of["over"].items():
                overlap = of["overlap"][name]
                runs = of["runs"][name]
                yield [
                    f"{title}: `{name}`",
                    f"`{of['compared_with'][name]}`",
                    *(ratio(over[m]["median"]) for m in METRICS),
                    f"{sum(r['preemptions'] for r in runs):g}",
                    f"{sum(r['lent'] for r in runs) / len(runs):.1f}",
                    ratio(overlap),
                ]

    header = ["", "over", *METRICS.values(), "preempted", "layers lent", "overlap"]
    return {"mirage_live": markdown(header, rows())}


def renew(result: Json) -> None:
    """Write the tables of a result into the documentation."""
    made = live(result) if result.get("benchmark") == "mirage_live" else tables(result)
    doc_tables.renew(made)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="renew the tables of docs/mirage-*.md")
    parser.add_argument("results", nargs="+", type=Path, help="JSON of mirage_sim, mirage_live")
    for file in parser.parse_args(argv).results:
        renew(json.loads(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
