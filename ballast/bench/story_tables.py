"""Format stories as terminal text: two runs side by side, and differences found by a replay.

Used by `ballast story`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.table import Table

from ballast import __version__
from ballast.bench.story_report import Jobs, StoryReport
from ballast.bench.tables import comparison_table, percent, seconds
from ballast.core.entries import StoryEntry
from ballast.sim.replay import StoryDifference, StoryReplay
from ballast.sim.story_reader import DeviceStory

COUNTED = {
    "activations": "Activate",
    "evictions": "Evict",
    "requests preempted": "Preempt",
    "changes of rotating layers": "Remap",
}
"""Decisions that are counted, as they are called."""


def story_table(a: StoryReport, b: StoryReport) -> Table:
    """Compare two stories: the rows of `comparison_table`, and counts of the devices' actions."""
    table = comparison_table([a.report, b.report])
    table.add_section()
    for name, action in COUNTED.items():
        table.add_row(name, *(str(t.counts.get(action, 0)) for t in (a, b)))
    table.add_row("jobs with a prefill", *(_jobs(t.prefills) for t in (a, b)))
    table.add_row("jobs of decodes alone", *(_jobs(t.decodes) for t in (a, b)))
    table.add_row("lanes busy", *(percent(t.busy) for t in (a, b)))
    return table


def first_difference(
    a: StoryReport, b: StoryReport
) -> tuple[int, StoryEntry | None, StoryEntry | None] | None:
    """Find the first decision in which two stories differ; None: all are the same.

    Returns the number of equal decisions before it, then the next one of each story (None: it has
    no more). Times and reasons of decisions are not compared.
    """
    pairs = itertools.zip_longest(a.decisions, b.decisions)
    for i, (one, other) in enumerate(pairs):
        if one is None or other is None or _what(one) != _what(other):
            return i, one, other
    return None


def difference_lines(a: StoryReport, b: StoryReport) -> Iterator[str]:
    """The same in words."""
    found = first_difference(a, b)
    if found is None:
        yield f"the same decisions in the same order, all {len(a.decisions)}"
        return
    same, *pair = found
    yield f"the same decisions in the same order, {same} of them; then:"
    for t, entry in zip((a, b), pair, strict=True):
        yield f"  {t.report.name}: {'nothing more' if entry is None else _said(entry)}"


def comparison_json(a: StoryReport, b: StoryReport) -> dict[str, Any]:
    """Plain data; times in seconds."""
    found = first_difference(a, b)
    same = len(a.decisions) if found is None else found[0]
    pair = None if found is None else {"a": found[1], "b": found[2]}
    document = {"same_decisions": same, "first_difference": pair}
    return {"a": _json(a), "b": _json(b), **document}


def _json(t: StoryReport) -> dict[str, Any]:
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
    plan = entry.get("plan", {"rotation": entry.get("rotation")})  # before there were plans
    return entry["action"], entry["model"], entry.get("request_id"), plan


def _said(entry: StoryEntry) -> str:
    *parts, plan = _what(entry)
    if (rotation := plan.get("rotation")) is not None:
        parts.append(f"layers {list(rotation['layers'])} / {rotation['slots']}")
    what = " ".join(str(part) for part in parts if part is not None)
    why = f" ({entry['why']})" if entry.get("why") else ""
    return f"{what} at {seconds(entry['at'])}{why}"


def _jobs(jobs: Jobs) -> str:
    return "0" if jobs.mean is None else f"{jobs.number} x {seconds(jobs.mean)}"


def replay_text(life: DeviceStory, found: StoryReplay) -> str:
    """A line that says whether it did the same again; else where it did not, and what before."""
    snapshot = life.snapshot
    how = "live" if snapshot.overhead is None else "simulated"
    head = f"{life.device}, {snapshot.preset}, {how}, from line {life.line}"
    if snapshot.version != __version__:
        head += f", by Ballast {snapshot.version} (this is {__version__})"
    did = f"{found.events} events, {found.decisions} decisions, {found.jobs} jobs"
    if found.difference is not None:
        return "\n".join([f"{head}: {did}, then a difference", *_shown(life, found.difference)])
    if found.stray is not None:
        return f"{head}: {did}: the same; what follows cannot be replayed: {found.stray}"
    return f"{head}: {did}: the same" + ("" if life.over else "; it breaks off there")


def headless_text(device: str, entries: int) -> str:
    """A line about a life of which only the last entries are there."""
    return f"{device}: {entries} entries cannot be replayed: the part before them has been deleted"


def _shown(life: DeviceStory, d: StoryDifference) -> Iterator[str]:
    first = d.index - len(d.before)
    for i, entry in enumerate(d.before, first):
        yield f"  line {life.lines[i]}: {_entry_text(entry)}"
    where = f"line {life.lines[d.index]}" if d.index < len(life.lines) else "the end"
    yield f"  {where}, recorded: {_entry_text(d.recorded)}"
    yield f"  {where}, replayed: {_entry_text(d.replayed)}"
    if d.why:
        yield f"  {d.why}"


def _entry_text(entry: StoryEntry | None) -> str:
    return "nothing" if entry is None else msgspec.json.encode(entry).decode()
