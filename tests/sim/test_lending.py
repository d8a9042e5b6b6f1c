"""Two devices in virtual time that lend to each other at random: books agree, stories replay."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.actions import Lend, Recall
from ballast.core.event import FailedOutput, FinishedOutput, Output
from ballast.core.link import LinkRates
from ballast.engine.state import DeviceState
from ballast.engine.story_file import StoryFile
from ballast.kv.layout import fitted
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.fresh import check_views
from tests.sim.neighbours import WAY, Neighbours
from tests.sim.test_leap import COSTS
from tests.sim.test_story import conversations

NAMES = ("cpu:0", "cpu:1")


class Pair(Neighbours):
    """The second is short of memory, the first has three times as much."""

    def __init__(self, seed: int, preset: str, path: Path) -> None:
        self.random = random.Random(seed)
        fleet, specs, requests = conversations(seed, preset)
        specs = [fitted(s, None, fleet.device.page_bytes) for s in specs]
        self.ends: Counter[str] = Counter()
        self.asked = 0
        self.files: list[StoryFile] = []
        profile = MachineProfile(
            costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=3e-4
        )
        sims: dict[str, SimDevice] = {}
        for name, times in zip(NAMES, (3, 1), strict=True):
            budget = times * fleet.device.budget_bytes
            settings = replace(fleet.device, name=name, budget_bytes=budget)
            self.files.append(StoryFile(path, name))
            sims[name] = SimDevice(
                settings,
                specs,
                resolve(preset),
                profile,
                self._said,
                self.files[-1].write,
                self._observe,
                leaps=False,
            )
            again = [replace(r, id=f"{r.id}-{i}") for i in range(10) for r in requests]
            mine = again if times == 1 else requests[:4]
            self.asked += len(mine)
            for r in mine:
                sims[name].submit(r)
        self.last = max(r.arrival for r in requests)
        super().__init__(sims)
        self.meet()

    def _said(self, now: float, output: Output) -> None:
        self.ends["finished"] += isinstance(output, FinishedOutput)
        self.ends["failed"] += isinstance(output, FailedOutput)

    def _observe(self, now: float, state: DeviceState) -> None:
        state.validate()
        check_views(state)
        for m in state.models.values():
            self.seen["used"] += m.kv.borrowed_pages > 0

    def play(self) -> None:
        """Act at random as long as requests come, and on until all have ended."""
        self.go(3 * WAY)
        while self.now < self.last + 1.0:
            self.act()
            self.go(self.random.choice([0.01, 0.03, 0.1]))
        while any(sim.open_requests for sim in self.sims.values()):
            self.go(0.1)
        self.finish()

    def act(self) -> None:
        lender = self.random.choice([NAMES[0], *NAMES])
        other = self.other(lender)
        chance = self.random.random()
        if chance < 0.55:
            self.order(lender, Lend(other, self.random.randint(1, 30)))
        elif chance < 0.95:
            pages = self.random.choice([None, 1, 3, 7])
            self.order(lender, Recall(other, pages, 1000.0))
        else:
            self.part()
            self.go(2 * WAY + 1.0)
            self.meet()

    def finish(self) -> None:
        for name in NAMES:
            self.order(name, Recall(self.other(name), None, 1000.0))
        self.go(1.0)
        for sim in self.sims.values():
            assert sim.state.lending.lent == sim.state.lending.borrowed == {}
            sim.finish(self.now)
        for file in self.files:
            file.close()


@pytest.mark.parametrize(
    "preset", ["static", "swap", pytest.param("balloon", marks=pytest.mark.slow)]
)
def test_books_agree_and_stories_replay(preset: str, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        pair = Pair(seed, preset, tmp_path / f"{seed}")
        pair.play()
        assert pair.ends.total() == pair.asked
        seen += pair.seen
        for life in read_device_stories(tmp_path / f"{seed}"):
            found = replay(life)
            assert found.difference is None, f"seed {seed}: {found.difference}"
            assert found.stray is None
            for entry in life.entries:
                seen.update(entry.get("vacated", {}))
                seen["preempted"] += entry.get("by") == "lender"
    messages = {"PagesLentEvent", "PagesReturnedEvent", "PeerReleasedReport"}
    wanted = {*messages, "used", "home", "dropped", "preempted"}
    if preset == "swap":  # its one resident model has room to bring all of its KV home
        wanted.discard("preempted")
    assert {name for name in wanted if not seen[name]} == set(), seen
    assert not seen["late"]
