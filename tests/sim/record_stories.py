"""Record the stories of `test_old_stories`: `python -m tests.sim.record_stories [NAME ...]`.

Each is a run in virtual time, recorded once and kept as it is, so that a later version of policies
and loop can be held against the decisions of this one. Recording one anew changes what the test
holds the code against: that is for new stories, and for those whose decisions have been mended.
Without names it lists what there is, recorded or not.
"""

from __future__ import annotations

import lzma
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve, shared_options
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.story_reader import DeviceStory, read_device_stories
from tests.sim import test_kvswap
from tests.sim.restless import layered_world, lending_world
from tests.sim.scenarios import FIRST_ORDERS, Ask, Model, Order, Scenario, Seeded, scenario
from tests.sim.test_enough_memory import TURNS, world
from tests.sim.test_leap import COSTS
from tests.sim.test_lending import Pair
from tests.sim.test_mirage_runs import LINK, burst
from tests.sim.test_mirage_runs import spec as layered_spec
from tests.sim.test_simulate import fleet
from tests.sim.test_story import conversations
from tests.sim.watching import NAMES, Run

STORIES = Path(__file__).parent / "stories"
SUFFIX = ".jsonl.xz"
World = tuple[FleetSettings, list[ModelSpec], list[Submission]]
PREEMPTIVE = {**TURNS, "preemptive": 1}
LATER = {
    "late_last": 0.0,
    "fair_shares": 0.0,
    "segments": 0.0,
    "steps": 0.0,
    "decode_share": 0.5,
    "promote": 0.0,
}
"""Options that are younger than the first stories, as they were before they were options."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run: the worlds of some seeds, one life each, under one preset."""

    preset: str
    make: Callable[[int, str, int], World]
    """(seed, preset, lanes)"""
    seeds: tuple[int, ...]
    lanes: int = 1
    options: Mapping[str, float] = field(default_factory=dict)
    link: float = 1e8
    """Bytes per second, each way."""
    leaps: bool = True

    def record(self, path: Path) -> None:
        for seed in self.seeds:
            settings, specs, requests = self.make(seed, self.preset, self.lanes)
            device = replace(settings.device, lanes=self.lanes)
            if self.lanes > 1:
                device = replace(device, threads=self.lanes)
            later = shared_options(self.preset, LATER)
            options = {**later, **settings.options, **self.options}
            file = StoryFile(path, device.name)
            profile = MachineProfile(
                costs=dict.fromkeys((s.name for s in specs), COSTS),
                link=LinkRates.even(self.link),
                overhead=3e-4,
            )
            sim = SimDevice(
                device,
                specs,
                resolve(self.preset, options),
                profile,
                lambda now, output: None,
                file.write,
                leaps=self.leaps,
            )
            for r in requests:
                sim.submit(r)
            sim.finish(max(r.arrival for r in requests))
            sim.state.pool.validate()
            file.close()


def plain(seed: int, preset: str, lanes: int) -> World:
    return world(seed, preset, lanes)


def talking(seed: int, preset: str, lanes: int) -> World:
    assert lanes == 1
    return conversations(seed, preset)


def layered(seed: int, preset: str, lanes: int) -> World:
    return layered_world(seed, preset, lanes, together=True)


def lending_layers(seed: int, preset: str, lanes: int) -> World:
    return lending_world(seed)


def deep(seed: int, preset: str, lanes: int) -> World:
    """Three models of 16 layers, and a burst that lacks pages."""
    specs = [layered_spec(name) for name in "abc"]
    weights = sum(s.weight_pages(test_kvswap.worlds.PAGE) for s in specs)
    settings = fleet(preset, specs, weights + 120)
    return settings, specs, burst(30, 0.0, 60.0, seed)


def swapping(seed: int, preset: str, lanes: int) -> World:
    """One model of eight layers, and requests that lack pages."""
    return (
        fleet(preset, [test_kvswap.SPEC], test_kvswap.PAGES),
        [test_kvswap.SPEC],
        test_kvswap.ARRIVALS[:40],
    )


@dataclass(frozen=True, slots=True)
class Lending:
    """Two devices that lend to each other at an operator's orders."""

    preset: str
    seed: int

    def record(self, path: Path) -> None:
        pair = Pair(self.seed, self.preset, path)
        pair.play()


@dataclass(frozen=True, slots=True)
class Played:
    """Scenarios, of a preset and seeds or as they are given: pinned models, segments in common,
    times to live, operators, pauses, and a request that nothing can serve any more."""

    preset: str = ""
    seeds: tuple[int, ...] = ()
    given: tuple[Scenario, ...] = ()

    def record(self, path: Path) -> None:
        random_ones = (
            scenario(Seeded(random.Random(seed)), (self.preset,), FIRST_ORDERS)
            for seed in self.seeds
        )
        for made in (*random_ones, *self.given):
            files = {name: StoryFile(path, name) for name in NAMES}
            options = {**shared_options(made.preset, LATER), **dict(made.options)}
            made = replace(made, options=tuple(options.items()))
            Run(made, {name: file.write for name, file in files.items()})()
            for file in files.values():
                file.close()


STUCK = Scenario(
    preset="static",
    models=(Model(kv_heads=4, layers=3), Model(kv_heads=4, layers=3)),
    more_weights=100,
    kv_pages=120,
    acts=(
        Ask(after=0.0, model=0, prompt=300, output=200),
        Ask(after=0.01, model=0, prompt=300, output=20),
        Ask(after=0.01, model=0, prompt=60, output=20, n=3, gap=0.01),
        Order(after=0.05, what="change", model=1, amount=4),
    ),
)
"""The share of the first model is smaller than when its requests were accepted."""
FAST = 1e11
QUICKLY = {"adapt": 0.02, "late_last": 1.0}
CASES: dict[str, Case | Lending | Played] = {
    "static-rr-1": Case("static", talking, (1, 4, 8)),
    "static-deadline-2": Case("static+deadline", plain, (0, 3, 7, 9), lanes=2),
    "swap-rr-1": Case("swap", talking, (2, 5, 8)),
    "swap-deadline-1": Case("swap+deadline", talking, (3, 9)),
    "swap-rr-2": Case("swap", plain, (6, 8, 9, 11), lanes=2),
    "lru-rr-1": Case("lru", talking, (5,)),
    "balloon-deadline-1": Case("balloon", talking, (2, 7)),
    "balloon-deadline-1-more": Case("balloon", plain, (350, 358, 550, 553, 560)),
    "balloon-deadline-2": Case("balloon", plain, (0, 8), lanes=2),
    "balloon-rr-1": Case("balloon+round-robin", talking, (6, 11)),
    "balloon-rr-2": Case("balloon+round-robin", plain, (1, 2, 8, 14), lanes=2, leaps=False),
    "balloon-deadline-3": Case("balloon", plain, (351, 355, 360), lanes=3),
    "recompute-pooled": Case("recompute", plain, (0, 5, 8, 13)),
    "recompute-pooled-2": Case("recompute+deadline", plain, (350, 352, 357), lanes=2),
    "recompute-shares": Case("recompute", deep, (3,), options={"pooled": 0}),
    "recompute-turns": Case("recompute", deep, (4,), options=TURNS),
    "recompute-preemptive": Case("recompute", deep, (5,), options={**PREEMPTIVE, "pooled": 0}),
    "mirage-pooled": Case("mirage", deep, (3,), options={"cap": 0.0}, link=LINK),
    "mirage-capped": Case("mirage", deep, (4,), link=LINK),
    "mirage-shares": Case("mirage", deep, (5,), options={"pooled": 0}, link=LINK),
    "mirage-turns": Case("mirage", deep, (6,), options=TURNS, link=LINK),
    "mirage-preemptive-deadline": Case(
        "mirage+deadline", deep, (7,), options=PREEMPTIVE, link=LINK
    ),
    "mirage-small": Case("mirage", lending_layers, (0, 31)),
    "mirage-rr-2": Case("mirage", layered, (3, 9, 12), lanes=2),
    "kvswap-pooled": Case("kvswap", swapping, (1,), link=FAST),
    "kvswap-shares": Case("kvswap", swapping, (1,), options={"pooled": 0}, link=FAST),
    "kvswap-uncapped": Case("kvswap", swapping, (1,), options={"cap": 0}, link=1e7),
    "kvswap-slow": Case("kvswap", deep, (8,), link=LINK),
    "kvswap-turns": Case("kvswap", deep, (9,), options=TURNS, link=LINK * 100),
    "kvswap-deadline": Case("kvswap+deadline", deep, (10,), options=PREEMPTIVE, link=LINK * 100),
    "static-fcfs-1": Case("static+fcfs", talking, (1, 4)),
    "muxserve-2": Case("muxserve", plain, (0, 3, 7), lanes=2, options=QUICKLY),
    "prism-1": Case("prism", talking, (2, 6), options={"aging": 0.05}),
    "ballast-1": Case("ballast", talking, (2, 6)),
    "swiftcache-1": Case("swiftcache", talking, (2, 6)),
    "superinfer-1": Case("superinfer", deep, (4,), link=LINK),
    "c2cserve-1": Case("c2cserve", plain, (0, 3)),
    "played-static": Played("static", (1004, 1010)),
    "played-swap": Played("swap", (1004, 1010)),
    "played-balloon": Played("balloon", (1002, 1007, 1009, 1011)),
    "played-recompute": Played("recompute", (1007, 1011)),
    "played-mirage": Played("mirage", (1007, 1009, 1010)),
    "played-kvswap": Played("kvswap", (1001, 1007)),
    "stuck-static": Played(given=(STUCK,)),
    "lending-static": Lending("static", 2),
    "lending-balloon": Lending("balloon", 5),
    "lending-swap": Lending("swap", 4),
}
"""By the name of the file."""


def events_of(life: DeviceStory) -> Counter[str]:
    """What happens in a life, for choosing which are worth keeping."""
    seen: Counter[str] = Counter(events=len(life.entries))
    for entry in life.entries:
        for key in ("event", "action"):
            if key in entry and entry[key] not in ("Arrival", "Timer", "Drain", "Operate"):
                seen[entry[key] + ("!" if "refused" in entry else "")] += 1
        seen["promises"] += bool(entry.get("promises"))
        for end in entry.get("ended", ()):
            seen["preemptions"] += end.get("preemptions", 0)
            seen["cached"] += end.get("cached_tokens", 0) > 0
            seen[end.get("failed", "finished")] += 1
    return +seen


def read(path: Path) -> list[DeviceStory]:
    """The lives of a story that was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "story"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        return read_device_stories(plain)


def record(name: str) -> Path:
    """Record the story of that name anew."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "story"
        CASES[name].record(plain)
        path = STORIES / f"{name}{SUFFIX}"
        path.write_bytes(lzma.compress(plain.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        return path


def main(names: list[str]) -> None:
    for name in names:
        record(name)
    for name in CASES:
        path = STORIES / f"{name}{SUFFIX}"
        if not path.exists():
            print(f"{name}: not recorded")
        elif name in names or not names:
            seen = sum(map(events_of, read(path)), Counter[str]())
            result = " ".join(f"{what}={n}" for what, n in sorted(seen.items()))
            print(f"{name}: {path.stat().st_size} B, {result}")


if __name__ == "__main__":
    main(sys.argv[1:])
