"""What every script under `benchmarks/` shares: options, machine facts, turns, table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table


def options(
    doc: str | None,
    argv: Sequence[str] | None = None,
    extra: Callable[[argparse.ArgumentParser], object] | None = None,
) -> argparse.Namespace:
    """`json` (Path or None), `quick` (bool), and what `extra` adds. Prints the machine's facts.

    `doc` is the script's docstring; its first paragraph becomes the help text.
    """
    parser = argparse.ArgumentParser(description=(doc or "").strip().split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--quick", action="store_true", help="a shorter run, less exact")
    if extra is not None:
        extra(parser)
    args = parser.parse_args(argv)
    facts = ", ".join(f"{k} {v}" for k, v in machine().items())
    Console().print(f"[dim]{facts}[/dim]", highlight=False)
    return args


def machine() -> dict[str, Any]:
    """Facts that results depend on; nothing that names the machine."""
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return {
        "cores": len(cores),
        "memory_gib": _memory_gib(),
        "architecture": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def finish(
    args: argparse.Namespace,
    name: str,
    result: Mapping[str, Any],
    table: RenderableType | None = None,
) -> None:
    """Print `table` (by default all of `result`) and write the JSON if asked to.

    The file holds `result` at top level beside `benchmark`, `quick`, and the day, the commit and
    the machine it was taken on.
    """
    Console().print(result_table(name, result) if table is None else table)
    if args.json is not None:
        facts = {
            "benchmark": name,
            "quick": bool(args.quick),
            "day": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "machine": machine(),
        }
        write_json(args.json, {**facts, **result})


def commit() -> str:
    """The checkout's commit, ending in `-dirty` where files differ from it; "" without git."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Indented, NumPy numbers as plain ones; creates the folder. Refuses NaN and infinities."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=2, default=_plain, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


MET, MISSED, NOT_STATED = "met", "missed", "not stated"


def verdict(
    value: float | None, *, at_most: float | None = None, at_least: float | None = None
) -> str:
    """Whether a figure meets its goal: by the goal alone, however noisy the figure is.

    What was not measured, or compared with nothing, is not stated.
    """
    if value is None:
        return NOT_STATED
    low = at_least is None or value >= at_least
    high = at_most is None or value <= at_most
    return MET if low and high else MISSED


def result_table(name: str, result: Mapping[str, Any]) -> Group:
    """Print keys of single values, then a table for all records with the same fields, a row each.
    Longer lists of plain values are in the JSON alone."""
    rows: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}
    _collect("", result, rows)
    keys = Table("key", "value", title=name)
    tables = []
    for fields, records in rows.items():
        if len(records) == 1:
            path, cells = records[0]
            for field, cell in zip(fields, cells, strict=True):
                keys.add_row(f"{path}.{field}".removeprefix("."), cell)
        else:
            table = Table("", *fields)
            for path, cells in records:
                table.add_row(path, *cells)
            tables.append(table)
    return Group(keys, *tables)


def _collect(
    path: str, document: Any, rows: dict[tuple[str, ...], list[tuple[str, list[str]]]]
) -> None:
    """Add the records in `document`, by the names of their fields."""
    named = isinstance(document, Mapping)
    items = {str(k): v for k, v in (document.items() if named else enumerate(document))}
    inner = {k: v for k, v in items.items() if isinstance(v, Mapping | list | tuple)}
    short = {k for k, v in inner.items() if not isinstance(v, Mapping) and _is_cell(v)}
    cells = {k: _cell(v) for k, v in items.items() if k not in inner or k in short}
    if cells and named:
        rows.setdefault(tuple(cells), []).append((path, [*cells.values()]))
    for key, value in inner.items():
        if key not in short:
            _collect(f"{path}.{key}".removeprefix("."), value, rows)


def _is_cell(values: Sequence[Any]) -> bool:
    return len(values) <= 4 and not any(isinstance(v, Mapping | list | tuple) for v in values)


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the documentation; cells are text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}} -> {"a.b": 1}``; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements of one variant, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles; of fewer than four values the least and the greatest."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high

    def over(self, other: Samples) -> Samples:
        """Ratios round by round: what drifts in both variants alike cancels out."""
        return Samples(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def to_json(self) -> dict[str, Any]:
        low, high = self.spread
        return {"median": self.median, "low": low, "high": high, "values": list(self.values)}


def interleave(
    variants: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0
) -> dict[str, Samples]:
    """Run each variant once per round, in turns, and keep what it returns.

    The order is reversed in every other round, so that none always runs on what another leaves
    behind. `warmup` rounds come first and are not kept.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"no measurement in {rounds} rounds after {warmup}")
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        order = list(variants)[:: 1 if turn % 2 == 0 else -1]
        for name in order:
            value = variants[name]()
            if turn >= warmup:
                taken[name].append(value)
    return {name: Samples(tuple(values)) for name, values in taken.items()}


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return value.name
    raise TypeError(f"{type(value).__name__} has no place in a result")
