"""What came of replaying a life, in words."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ballast import __version__
from ballast.core.entries import StoryEntry
from ballast.sim.lives import DeviceStory
from ballast.sim.replay import StoryDifference, StoryReplay


def retell(life: DeviceStory, found: StoryReplay) -> str:
    """A line that says whether it did the same again; else where it did not, and what before."""
    told = life.snapshot
    how = "live" if told.overhead is None else "simulated"
    head = f"{life.device}, {told.preset}, {how}, from line {life.line}"
    if told.version != __version__:
        head += f", by Ballast {told.version} (this is {__version__})"
    did = f"{found.events} events, {found.decisions} decisions, {found.jobs} jobs"
    if found.difference is not None:
        return "\n".join([f"{head}: {did}, then a difference", *_shown(life, found.difference)])
    if found.stray is not None:
        return f"{head}: {did}: the same; what follows cannot be replayed: {found.stray}"
    return f"{head}: {did}: the same" + ("" if life.over else "; it breaks off there")


def beheaded(device: str, entries: int) -> str:
    """A line about a life of which only the last entries are there."""
    return f"{device}: {entries} entries cannot be replayed: the part before them has been deleted"


def _shown(life: DeviceStory, d: StoryDifference) -> Iterator[str]:
    first = d.index - len(d.before)
    for i, entry in enumerate(d.before, first):
        yield f"  line {life.lines[i]}: {_json(entry)}"
    where = f"line {life.lines[d.index]}" if d.index < len(life.lines) else "the end"
    yield f"  {where}, recorded: {_json(d.recorded)}"
    yield f"  {where}, replayed: {_json(d.replayed)}"
    if d.why:
        yield f"  {d.why}"


def _json(entry: StoryEntry | None) -> str:
    return "nothing" if entry is None else msgspec.json.encode(entry).decode()
