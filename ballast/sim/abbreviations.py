"""Abbreviate residency plans as stories did that were recorded before policies chose plans.

Used by `sim.replay`, so that what policies decide today compares equal with what they decided then
(decision 084). A frozen reader: no new abbreviation is added.
"""

from __future__ import annotations

from ballast.core.entries import StoryEntry

_NONE = {"layers": [], "slots": 0}


def as_recorded(recorded: StoryEntry, replayed: StoryEntry) -> StoryEntry:
    """Return a replayed plan in the form of the action that is recorded in its place; any other
    entry as it is. How many pages an eviction was to free follows from no plan: it is taken over,
    and what was freed shows in what follows."""
    if "plan" not in replayed or "plan" in recorded or "action" not in recorded:
        return replayed
    rest = {key: value for key, value in replayed.items() if key != "plan"}
    plan, kind = replayed["plan"], recorded["action"]
    if kind == "Evict" and "absent" in plan:
        return rest | {key: recorded[key] for key in ("pages",) if key in recorded}
    if kind == "Activate" and "absent" not in plan:
        return rest | ({"in_place": True} if "in_place" in plan and "in_place" in recorded else {})
    if kind == "Remap":
        return rest | {"rotation": plan.get("rotation", _NONE)}
    return replayed
