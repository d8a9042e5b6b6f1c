"""Stories that were recorded once, one or more of each preset, replay to the same decisions today.

They hold the loop and the policies to what they decided when a story was recorded; which runs they
are, and how to record one, is in `record_stories`. A difference fails the test. One that is wanted,
because what was decided then was a defect, is listed in `MENDED`; then it must be there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from ballast.core.entries import StoryEntry
from ballast.policy.presets import ORDERS, PRESETS, shared_options
from ballast.sim.replay import StoryDifference, replay
from ballast.sim.story_reader import DeviceStory
from tests.sim.record_stories import CASES, LATER, STORIES, SUFFIX, events_of, read

NAMES = sorted(path.name.removesuffix(SUFFIX) for path in STORIES.glob(f"*{SUFFIX}"))


@dataclass(frozen=True, slots=True)
class Mended:
    """Where a story is known to go another way today, and why that is right."""

    life: int
    """Index of the life within the story; those before it, and after, are as they were."""
    entry: int
    """Index of the first entry that differs, within the life."""
    replayed: StoryEntry | None
    """What happens there instead: keys of the entry and their values; None: nothing does."""
    reason: str


_SCATTERED = (
    "cached prefixes that lay scattered over slabs in use gave no page back, so that requests were "
    "preempted, swapped or kept waiting instead"
)


def _scattered(life: int, entry: int, model: str, pages: int) -> Mended:
    """Moving blocks together frees pages there, once what is cached between them is forgotten."""
    compact = {"action": "Compact", "model": model, "pages": pages}
    return Mended(life, entry, compact, _SCATTERED)


def _streams_first(life: int, entry: int, model: str) -> Mended:
    """A job of another model is first."""
    reason = "streams waited for longer than `longest_gap` beside late prompts of other models"
    return Mended(life, entry, {"model": model}, reason)


def _own_cache(life: int, entry: int, job: int, model: str) -> Mended:
    """A request is admitted in place of what freed pages for it, or kept them."""
    reason = "pages were freed for a request that its model's own cached prefixes had room for"
    return Mended(life, entry, {"job": job, "model": model}, reason)


def _free_pages(entry: int, model: str, pages: int) -> Mended:
    """Cached prefixes that stayed make way here."""
    reason = "a growth that free pages covered in part took all of its blocks from cached prefixes"
    return Mended(0, entry, {"action": "DropCache", "model": model, "pages": pages}, reason)


def _by_prior(entry: int) -> Mended:
    """Blocks of other requests are staged first."""
    reason = "answers were expected to be as long as their clients allow, until the first had ended"
    order = ["q3", "q7", "q2", "q4", "q8", "q6"]
    return Mended(0, entry, {"action": "Stage", "model": "a", "order": order}, reason)


MENDED: dict[str, tuple[Mended, ...]] = {
    "ballast-1": (_own_cache(0, 27, 42, "m0"),),
    "balloon-deadline-1": (_own_cache(0, 27, 42, "m0"), _own_cache(1, 26, 27, "m0")),
    "balloon-deadline-1-more": (_streams_first(0, 54, "m0"), _streams_first(2, 31, "m1")),
    "c2cserve-1": (_streams_first(0, 86, "m2"), _streams_first(1, 75, "m0")),
    "balloon-deadline-2": (_scattered(0, 318, "m0", 1), _scattered(1, 257, "m0", 3)),
    "balloon-rr-2": (_scattered(2, 257, "m0", 3),),
    "kvswap-deadline": (_free_pages(135, "b", 22),),
    "kvswap-pooled": (_by_prior(57),),
    "kvswap-shares": (_by_prior(49),),
    "kvswap-turns": (_own_cache(0, 324, 257, "c"),),
    "kvswap-uncapped": (_by_prior(83),),
    "lending-balloon": (
        Mended(
            life=1,
            entry=84,
            replayed={"action": "DropCache", "model": "m1", "pages": 1},
            reason="KV whose slabs have several pages, as here, lies on no borrowed pages now: "
            "what it needs, others' cached prefixes have to make room for (decision 071).",
        ),
    ),
    "mirage-pooled": (_free_pages(401, "b", 2),),
    "mirage-preemptive-deadline": (_free_pages(554, "b", 12),),
    "mirage-small": (_scattered(0, 174, "m2", 3), _own_cache(1, 118, 159, "m2")),
    "mirage-turns": (_own_cache(0, 323, 244, "a"),),
    "played-balloon": (_own_cache(4, 104, 45, "m0"),),
    "played-recompute": (_own_cache(1, 111, 45, "m0"),),
    "played-swap": (
        Mended(
            life=0,
            entry=369,
            replayed={"promises": [{"model": "m0", "weights": 0, "kv": 2}]},
            reason="pages that were freed for a request under `swap` were promised to nobody; "
            "with several lanes the victim took them back, and was preempted again",
        ),
    ),
    "prism-1": (_own_cache(0, 27, 42, "m0"),),
    "recompute-pooled": (_scattered(0, 102, "m0", 1), _scattered(2, 70, "m0", 3)),
    "recompute-turns": (_own_cache(0, 412, 273, "a"),),
    "superinfer-1": (
        Mended(
            life=0,
            entry=143,
            replayed={"promises": [{"model": "a", "weights": 0, "kv": 18}]},
            reason="a request whose KV had to be computed again was preempted again and again, as "
            "it got ahead of its pace each time (decision 168)",
        ),
    ),
    "swiftcache-1": (_own_cache(0, 27, 42, "m0"),),
}
"""By name of the story, one for each life that differs: it goes its own way from there."""


@pytest.mark.parametrize("name", NAMES)
def test_old_stories_replay_to_the_same_decisions(name: str) -> None:
    differs: dict[int, StoryDifference] = {}
    for i, life in enumerate(map(_with_options, read(STORIES / f"{name}{SUFFIX}"))):
        found = replay(life, reasons=False)
        assert found.stray is None
        if found.difference is not None:
            differs[i] = found.difference
    known = {mended.life: mended for mended in MENDED.get(name, ())}
    assert differs.keys() <= known.keys(), {i: str(d) for i, d in differs.items()}
    for i, mended in known.items():
        assert i in differs, f"life {i} replays as it was recorded: {mended.reason}"
        there = differs[i]
        assert there.index == mended.entry, there
        if mended.replayed is None:
            assert there.replayed is None, there
        else:
            replayed = there.replayed or {}
            assert {k: replayed.get(k) for k in mended.replayed} == mended.replayed, there


def _with_options(life: DeviceStory) -> DeviceStory:
    """A life whose preset does without the options that came after it was recorded."""
    result = life.snapshot
    options = {**shared_options(result.preset, LATER), **result.options}
    return replace(life, snapshot=replace(result, options=options))


def test_stories_cover_every_preset_and_what_pressure_brings() -> None:
    assert sorted(CASES) == NAMES, "a story is missing, or nothing says how it was made"
    assert set(MENDED) <= set(NAMES)
    snapshots, seen = Counter[str](), Counter[str]()
    for name in NAMES:
        for life in read(STORIES / f"{name}{SUFFIX}"):
            preset = life.snapshot.preset.partition("+")[0]
            snapshots.update((preset, life.snapshot.order, f"{life.snapshot.device.lanes} lanes"))
            snapshots.update(f"{preset} {key}" for key in life.snapshot.options)
            seen += events_of(life)
    wanted = {*PRESETS, *ORDERS, "1 lanes", "2 lanes"}
    assert wanted - set(snapshots) == set(), snapshots
    happened = {"Preempt", "Evict", "DropCache", "Compact", "Remap", "Stage", "Hold", "promises"}
    happened |= {"Lend", "Recall", "AskedBack", "Pause", "Cancel", "out_of_memory"}
    assert happened - set(seen) == set(), seen
    size = sum((STORIES / f"{name}{SUFFIX}").stat().st_size for name in NAMES)
    assert size < len(PRESETS) * 40 * 1024, size
