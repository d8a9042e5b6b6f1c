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
from ballast.core.request import Request, Submission
from ballast.core.units import MiB
from ballast.engine.state import DeviceState
from ballast.engine.story_file import StoryFile
from ballast.kv.layout import fitted
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.kv_tiers import virtual_store
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.effort import some
from tests.engine.fresh import check_views
from tests.sim.neighbours import WAY, Neighbours
from tests.sim.test_leap import COSTS
from tests.sim.test_simulate import fleet, spec
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
        for sim in sims.values() if seed % 2 else ():  # KV comes home that steps would wait for
            sim.state.lending.bytes_per_second = 1e6
        self.meet()

    def _said(self, now: float, output: Output) -> None:
        self.ends["finished"] += isinstance(output, FinishedOutput)
        self.ends["failed"] += isinstance(output, FailedOutput)

    def _observe(self, now: float, state: DeviceState) -> None:
        state.validate()
        check_views(state)
        for m in state.models.values():
            self.seen["used"] += m.kv.borrowed.pages > 0

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
    for seed in some(range(6), 4):
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


class Conversations(Neighbours):
    """The first lends to the second, which has more conversations than pages of its own."""

    def __init__(self, kv_host: int = 0) -> None:
        model = spec("m", weight_pages=4)
        settings = fleet("swiftcache", [model], 24).device
        model = fitted(model, None, settings.page_bytes)
        profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e10), overhead=0.0)
        self.cached: dict[str, int] = {}
        super().__init__(
            {
                name: SimDevice(
                    replace(settings, name=name),
                    [model],
                    resolve("swiftcache"),
                    profile,
                    self._said,
                    leaps=False,
                    kv_store=virtual_store(kv_host),
                )
                for name in NAMES
            }
        )
        self.meet()
        self.go(3 * WAY)

    def _said(self, now: float, output: Output) -> None:
        if isinstance(output, FinishedOutput):
            self.cached[output.request_id] = output.cached_tokens

    def ask(self, conversation: int, turn: int, tokens: int, output: int = 1) -> None:
        self.sims[NAMES[1]].submit(
            Submission(
                id=f"{conversation}-{turn}",
                model="m",
                prompt=(conversation,) * tokens,
                max_tokens=output,
                arrival=self.now,
                ignore_eos=True,
            )
        )
        self.go(1.0)


def test_a_recall_takes_the_coldest_prefixes_wherever_they_lie() -> None:
    pair = Conversations()
    borrower = pair.sims[NAMES[1]].state
    kv = borrower.models["m"].kv
    pair.order(NAMES[0], Lend(NAMES[1], 20))
    pair.go(3 * WAY)
    tokens = 4 * kv.spec.block_tokens * kv.layout.blocks_per_slab
    for conversation in range(1, 10):
        pair.ask(conversation, 0, tokens)
    assert (kv.pages, kv.borrowed.pages) == (20, 16)
    pair.order(NAMES[0], Recall(NAMES[1], 12, 100.0))
    pair.go(1.0)
    assert (kv.pages, kv.borrowed.pages) == (20, 8)
    for conversation in range(3, 10):  # the first two had the eight pages that there are less
        pair.ask(conversation, 1, tokens)
        assert pair.cached[f"{conversation}-1"] == tokens - kv.spec.block_tokens
    borrower.validate()


def test_kv_of_borrowed_pages_is_on_the_host_too_and_outlives_their_recall() -> None:
    pair = Conversations(kv_host=64 * MiB)
    borrower = pair.sims[NAMES[1]].state
    kv = borrower.models["m"].kv
    pair.order(NAMES[0], Lend(NAMES[1], 20))
    pair.go(3 * WAY)
    tokens = 4 * kv.spec.block_tokens * kv.layout.blocks_per_slab
    for conversation in range(1, 10):
        pair.ask(conversation, 0, tokens)
    assert (kv.pages, kv.borrowed.pages) == (20, 16)
    pair.order(NAMES[0], Recall(NAMES[1], None, 100.0))
    pair.go(1.0)
    assert kv.borrowed.pages == 0
    for conversation in range(1, 10):
        pair.ask(conversation, 1, tokens)
        assert pair.cached[f"{conversation}-1"] == tokens - kv.spec.block_tokens
    assert borrower.tiers.fetched_tokens.total() > 0
    borrower.validate()


def test_fetches_end_before_a_block_on_a_borrowed_page() -> None:
    pair = Conversations(kv_host=64 * MiB)
    borrower = pair.sims[NAMES[1]].state
    kv = borrower.models["m"].kv
    tokens = 4 * kv.spec.block_tokens * kv.layout.blocks_per_slab
    for conversation in range(1, 7):  # there is room for five
        pair.ask(conversation, 0, tokens)
    pair.order(NAMES[0], Lend(NAMES[1], 2))
    pair.go(3 * WAY)
    pair.ask(1, 1, tokens)
    assert kv.borrowed.pages == 2
    assert 0 < pair.cached["1-1"] <= tokens // 2
    borrower.validate()


def test_a_request_that_decodes_has_its_kv_near_and_colder_prefixes_make_room() -> None:
    pair = Conversations()
    borrower = pair.sims[NAMES[1]].state
    kv = borrower.models["m"].kv
    tokens = 4 * kv.spec.block_tokens * kv.layout.blocks_per_slab - 24

    def near(conversation: int) -> bool:
        prompt = (conversation,) * tokens
        asked = Submission(id="", model="m", prompt=prompt, max_tokens=1)
        blocks = kv.prefixes.find(prompt, Request.salt_of(asked, kv.spec, None))
        assert blocks
        return not kv.borrowed.among(blocks)

    pair.order(NAMES[0], Lend(NAMES[1], 20))
    pair.go(3 * WAY)
    for conversation in range(1, 9):
        pair.ask(conversation, 0, tokens, 20)
    assert kv.borrowed.pages > 4
    far = next(c for c in range(1, 9) if not near(c))
    pair.ask(far, 1, tokens, 20)  # borrowed pages are read as the device's own: it stays
    assert not near(far)
    borrower.lending.bytes_per_second = 1e4
    pair.ask(far, 2, tokens)  # it decodes no step
    assert not near(far)
    pair.ask(far, 3, tokens, 20)
    assert near(far)
    assert far > 1
    assert not near(1)
    for conversation in range(1, 9):
        pair.ask(conversation, 9, tokens)
        size = kv.spec.block_tokens
        assert pair.cached[f"{conversation}-9"] == (tokens - 1) // size * size
    borrower.validate()
