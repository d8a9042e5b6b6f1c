"""Abbreviate residency plans as stories did that were recorded before `Reside` (decision 084).

Used by `sim.replay`, so that what policies decide today compares equal with what they decided then.
A frozen reader: no new abbreviation is added.
"""

from __future__ import annotations

from ballast.core.entries import StoryEntry

_NONE = {"layers": [], "slots": 0}


def as_recorded(recorded: StoryEntry, replayed: StoryEntry) -> StoryEntry:
    """Return a replayed `Reside` in the form of the action that is recorded in its place; any other
    entry as it is."""
    if replayed.get("action") != "Reside" or recorded.get("action") != "SwapKv":
        return replayed
    rest = {k: v for k, v in replayed.items() if k != "plan"}
    return rest | {"action": "SwapKv", "rotation": replayed["plan"].get("kv", _NONE)}
