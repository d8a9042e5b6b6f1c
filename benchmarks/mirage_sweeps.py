"""Sweeps of `mirage_sim`: turns, chunks, links, and what of `mirage` and of the setting matters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.mirage_cases import AMPLE, GROUPS, Case, Runs, canonical, ratios
from benchmarks.mirage_curves import At, averaged

QUANTA = 0.25, 1.0, 4.0
"""Seconds of a turn."""
STEPS = 256, 2048, 8192
"""Most tokens of a step."""
LINKS = 32e9, 64e9, 128e9, 256e9, 900e9
"""Nominal, bytes per second in one direction; GH200's own has 450e9."""
OTHER = "H100-80G"
"""With its own memory and link."""
STATED = 1.0, 10.0
"""Requests per second of OPT-13b alone that the text names."""
MIDDLE, HIGH, BEYOND = 2.0, 8.0, 32.0
"""Multiples of the knee; the last where eight times it is still less than the device serves."""
METRICS = "throughput", "frame_throughput", "p99_ttft", "p99_tbt", "p50_tbt", "p99_tpot"
OWN = (*METRICS, "preemptions", "lent_layers", "most_lent", "copying", "stalled")
LENGTHS = "ShareGPT", "Alpaca"

Fields = Mapping[str, Any]
"""Fields of a case."""


@dataclass(frozen=True)
class Sweep:
    """Points, each with a label, and the rows that are run at each."""

    points: Callable[[At], Iterator[tuple[str, Case]]]
    rows: tuple[Fields, ...]
    """The first is what the others are compared with."""


def _turns(at: At) -> Iterator[tuple[str, Case]]:
    for group in ("temporal_c1", "temporal_c2"):
        case = at(group, "ShareGPT", MIDDLE)
        for preemptive in (False, True):
            for quantum in QUANTA:
                how = "ends at once" if preemptive else "drains"
                label = f"{group}, {quantum:g} s, {how}"
                yield label, replace(case, quantum=quantum, preemptive=preemptive)


def _steps(at: At) -> Iterator[tuple[str, Case]]:
    for setting in GROUPS["inputs_c2"].settings:
        for multiple in (MIDDLE, HIGH):
            for step in STEPS:
                case = at("inputs_c2", setting, multiple)
                label = f"inputs_c2 {setting} at {multiple:g}, {step}"
                yield label, replace(case, step_tokens=step)


def _links(at: At) -> Iterator[tuple[str, Case]]:
    for group in ("temporal_c1", "mps_c1"):
        for setting in LENGTHS:
            case = at(group, setting, HIGH)
            for link in LINKS:
                yield f"{group}, {link / 1e9:g} GB/s", replace(case, link=link)
            yield f"{group}, {OTHER}", replace(case, kind=OTHER)


def _beyond(at: At) -> Iterator[tuple[str, Case]]:
    for group in ("temporal_c2", "rates_c2", "inputs_c2"):
        for setting in GROUPS[group].settings:
            yield f"{group}, {BEYOND:g}", at(group, setting, BEYOND)


def _ablations(at: At) -> Iterator[tuple[str, Case]]:
    for multiple in (MIDDLE, HIGH):
        for setting in LENGTHS:
            yield f"alone {setting}, {multiple:g}", at("alone", setting, multiple)


def _lookahead(at: At) -> Iterator[tuple[str, Case]]:
    for group in ("temporal_c1", "mps_c1"):
        yield f"{group} ShareGPT, {MIDDLE:g}", at(group, "ShareGPT", MIDDLE)


def _lru(at: At) -> Iterator[tuple[str, Case]]:
    for multiple in (MIDDLE, HIGH):
        for setting in LENGTHS:
            case = at("temporal_c1", setting, multiple)
            yield f"temporal_c1 {setting}, {multiple:g}", replace(case, sharing="shares")


def _reversion(at: At) -> Iterator[tuple[str, Case]]:
    for setting in LENGTHS:
        yield f"reversion {setting}, {HIGH:g}", at("reversion", setting, HIGH)


def _slices(at: At) -> Iterator[tuple[str, Case]]:
    for group in ("mig_c1", "mig_c1_link"):
        for multiple in (MIDDLE, HIGH):
            for setting in LENGTHS:
                yield f"{group}, {multiple:g}", at(group, setting, multiple)


def _stated(at: At) -> Iterator[tuple[str, Case]]:
    for rate in STATED:
        case = at("alone", "Alpaca", 1.0)
        yield f"alone Alpaca, {rate:g} requests/s", replace(case, multiple=0.0, rate=rate)


def _rows(*rows: str, ample: bool = False) -> tuple[Fields, ...]:
    return (*({"row": row} for row in rows), *([{"row": "recompute", "memory": AMPLE}] * ample))


SWEEPS: dict[str, Sweep] = {
    "beyond": Sweep(_beyond, _rows("recompute", "mirage", "kvswap", ample=True)),
    "turns": Sweep(_turns, _rows("recompute", "mirage")),
    "steps": Sweep(_steps, _rows("recompute", "mirage", ample=True)),
    "links": Sweep(_links, _rows("recompute", "mirage")),
    "ablations": Sweep(_ablations, _rows("mirage", "beta1", "beta2", "uncapped", "one_by_one")),
    "lookahead": Sweep(_lookahead, _rows("mirage", "one_by_one")),
    "lru": Sweep(_lru, _rows("mirage", "lru")),
    "reversion": Sweep(_reversion, _rows("mirage", "kept", "kept_uncapped")),
    "slices": Sweep(_slices, _rows("recompute", "mirage", "kvswap")),
    "stated": Sweep(_stated, _rows("mirage", "recompute", "uncapped")),
}


def sweep_cases(names: Iterable[str], at: At) -> Iterator[Case]:
    """Every run of these sweeps; `at` gives a group's case at a multiple of its knee."""
    for name in names:
        for _, case in SWEEPS[name].points(at):
            yield from (replace(case, **row) for row in SWEEPS[name].rows)


def swept(name: str, runs: Runs, at: At) -> dict[str, Any]:
    """By label: each row's ratios to the first row, means over the settings of that label; where
    the label has one setting, figures of its own as well."""
    labelled: dict[str, list[Case]] = {}
    for label, case in SWEEPS[name].points(at):
        labelled.setdefault(label, []).append(case)
    first, *others = SWEEPS[name].rows
    result: dict[str, Any] = {}
    for label, cases in labelled.items():
        entry: dict[str, Any] = {}
        for row in others:
            of = [replace(c, **row) for c in cases]
            over = {"memory": 1, **first}
            key = "ample" if "memory" in row else str(row["row"])
            entry[key] = {m: averaged(ratios(runs, of, m, **over)) for m in METRICS}
        if len(cases) == 1:
            for row in SWEEPS[name].rows:
                own = runs[canonical(replace(cases[0], **row))]
                key = "ample" if "memory" in row else str(row["row"])
                entry.setdefault(key, {})["own"] = {k: own[k] for k in OWN}
        result[label] = entry
    return result
