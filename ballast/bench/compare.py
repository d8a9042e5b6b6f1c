"""Two stories side by side: what clients saw, what devices did, where decisions first differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from ballast.bench.show import comparison_table, percent, seconds
from ballast.bench.telling import Jobs, Telling
from ballast.core.entries import StoryEntry

COUNTED = {
    "activations": "Activate",
    "evictions": "Evict",
    "requests preempted": "Preempt",
    "changes of rotating layers": "Remap",
}
"""Decisions that are counted, as they are called."""


def told_table(a: Telling, b: Telling) -> Table:
    """As the table of runs, with what the devices did."""
    table = comparison_table([a.report, b.report])
    table.add_section()
    for name, action in COUNTED.items():
        table.add_row(name, *(str(t.counts.get(action, 0)) for t in (a, b)))
    table.add_row("jobs with a prefill", *(_jobs(t.prefills) for t in (a, b)))
    table.add_row("jobs of decodes alone", *(_jobs(t.decodes) for t in (a, b)))
    table.add_row("lanes busy", *(percent(t.busy) for t in (a, b)))
    return table


def first_difference(
    a: Telling, b: Telling
) -> tuple[int, StoryEntry | None, StoryEntry | None] | None:
    """Of the sequences of decisions: how many are the same, then either's next (None: it has no
    more). None if they are the same to the end. When and why they were taken does not count."""
    pairs = itertools.zip_longest(a.decisions, b.decisions)
    for i, (one, other) in enumerate(pairs):
        if one is None or other is None or _what(one) != _what(other):
            return i, one, other
    return None


def difference_lines(a: Telling, b: Telling) -> Iterator[str]:
    """The same in words."""
    found = first_difference(a, b)
    if found is None:
        yield f"the same decisions in the same order, all {len(a.decisions)}"
        return
    same, *pair = found
    yield f"the same decisions in the same order, {same} of them; then:"
    for t, entry in zip((a, b), pair, strict=True):
        yield f"  {t.report.name}: {'nothing more' if entry is None else _said(entry)}"


def comparison_json(a: Telling, b: Telling) -> dict[str, Any]:
    """Plain data; times in seconds."""
    found = first_difference(a, b)
    same = len(a.decisions) if found is None else found[0]
    pair = None if found is None else {"a": found[1], "b": found[2]}
    document = {"same_decisions": same, "first_difference": pair}
    return {"a": _json(a), "b": _json(b), **document}


def _json(t: Telling) -> dict[str, Any]:
    return {
        **t.report.to_json(),
        "decisions": t.counts,
        "jobs": {
            name: {"number": jobs.number, "mean_seconds": jobs.mean}
            for name, jobs in (("prefill", t.prefills), ("decode", t.decodes))
        },
        "lanes_busy": t.busy,
    }


def _what(entry: StoryEntry) -> tuple[Any, ...]:
    return entry["action"], entry["model"], entry.get("request_id"), entry.get("rotation")


def _said(entry: StoryEntry) -> str:
    *parts, rotation = _what(entry)
    if rotation is not None:
        parts.append(f"layers {list(rotation['layers'])} / {rotation['slots']}")
    what = " ".join(str(part) for part in parts if part is not None)
    why = f" ({entry['why']})" if entry.get("why") else ""
    return f"{what} at {seconds(entry['at'])}{why}"


def _jobs(jobs: Jobs) -> str:
    return "0" if jobs.mean is None else f"{jobs.number} x {seconds(jobs.mean)}"
