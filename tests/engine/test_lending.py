"""Two live devices that lend to each other: no token changes, the books agree, stories replay."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import Lend, Recall
from ballast.core.command import CommandOutcome, DeviceCommand
from ballast.core.event import Event
from ballast.core.lease import (
    LendingMessage,
    PagesReturnedEvent,
    PeerGoneEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)
from ballast.core.link import Direction, LinkSettings
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.memory.lending.lender import OWNER
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import VOCAB, make_llama
from tests.engine.holding import held

DEADLINE = 240.0
PAGE = 64 * KiB
LENDER, BORROWER = "cpu:0", "cpu:1"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "base", 1)


@pytest.fixture(scope="module")
def fleet(path: Path) -> FleetSettings:
    """Of one device, with room for its weights and six pages of KV."""
    device = DeviceSettings(
        budget_bytes=64 * MiB, page_bytes=PAGE, step_tokens=32, step_logits=8, threads=1
    )
    models = (ModelSettings(name="base", path=str(path), dtype="float32"),)
    roomy = FleetSettings(models=models, device=device)
    with InProcess(roomy) as server:
        state = server.device.state
        pages = state.arena.pages + state.models["base"].weights.pages + 6
    return replace(roomy, device=replace(device, budget_bytes=pages * PAGE))


def asked(n: int) -> list[Submission]:
    return [
        Submission(
            id=f"r{i}",
            model="base",
            prompt=tuple((11 * k + 5 * i) % VOCAB for k in range(20 + 10 * i)),
            max_tokens=150,
            sampling=Sampling(temperature=0.7, seed=i),
            ignore_eos=True,
        )
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def expected(fleet: FleetSettings) -> dict[str, list[int]]:
    """By request, with memory for all of them."""
    roomy = replace(fleet, device=replace(fleet.device, budget_bytes=64 * MiB))
    with InProcess(roomy) as server:
        result = server.generate(asked(10))
    return {id: answer.tokens for id, answer in result.items()}


class Pair:
    """Two devices and what passes between them, with nobody who would kill."""

    names: ClassVar[tuple[str, str]] = (LENDER, BORROWER)

    def __init__(self, fleet: FleetSettings, story: Path) -> None:
        self.servers: dict[str, InProcess] = {}
        self.words: list[LendingMessage] = []
        self.changed = threading.Condition()
        self.deaf = False
        """Whether what is asked back is lost on its way."""
        lender, borrower = self.names
        for name, budget in ((lender, 64 * MiB), (borrower, fleet.device.budget_bytes)):
            device = replace(fleet.device, name=name, budget_bytes=budget)
            self.servers[name] = self._serve(replace(fleet, device=device, story_path=str(story)))
        for name, server in self.servers.items():
            server.device.set_lending_outbox(partial(self._hear, self._other(name)))

    def _serve(self, fleet: FleetSettings) -> InProcess:
        return InProcess(fleet)

    def _other(self, name: str) -> str:
        return self.names[1 - self.names.index(name)]

    def _hear(self, other: str, word: LendingMessage) -> None:
        with self.changed:
            self.words.append(word)
            self.changed.notify_all()
        lost = self.deaf and not isinstance(word, PagesReturnedEvent)
        if not lost and not isinstance(
            word, PeerMetReport | PeerOverdueReport | PeerReleasedReport
        ):
            self._pass_on(other, word)

    def _pass_on(self, other: str, word: Event) -> None:
        self.servers[other].device.post(word)

    def wait_for(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, DEADLINE)

    def said(self, kind: type[LendingMessage]) -> int:
        return sum(isinstance(word, kind) for word in self.words)

    def meet(self) -> None:
        for name, server in self.servers.items():
            exported = self.servers[self._other(name)].device.export()
            assert exported is not None
            fd = None if exported.fd is None else os.dup(exported.fd)
            server.device.add_peer(self._other(name), 1, replace(exported, fd=fd))
        self.wait_for(lambda: self.said(PeerMetReport) == 2)

    def order(self, order: DeviceCommand, name: str = "") -> Callable[[], CommandOutcome]:
        """By the lender, if no other is named. What is returned waits for the outcome."""
        ended = threading.Event()
        outcomes: list[CommandOutcome] = []

        def done(outcome: CommandOutcome) -> None:
            outcomes.append(outcome)
            ended.set()

        self.servers[name or self.names[0]].device.command(order, done)

        def outcome() -> CommandOutcome:
            assert ended.wait(DEADLINE)
            return outcomes[0]

        return outcome

    @property
    def borrower(self) -> InProcess:
        return self.servers[self.names[1]]

    def validate(self, lent: int) -> None:
        """Both are quiet: ledgers, ranges and operating system agree, on both sides."""
        for server in self.servers.values():
            state = server.device.state
            state.pool.validate()
            state.lending.validate()
            result = server.device.snapshot()
            assert {o: n for o, n in result.owners.items() if n} == {
                (o if o != OWNER else f"{OWNER}:{self.names[1]}"): n
                for o, n in state.pool.ledger.owners().items()
            }
            for m in state.models.values():
                m.kv.validate([])
                m.weights.validate()
                assert m.kv.book.backing.os_backed() == m.kv.pages + m.kv.borrowed.pages
        lender, borrower = (self.servers[n].device.snapshot() for n in self.names)
        assert lender.owners.get(f"{OWNER}:{self.names[1]}", 0) == lent
        assert borrower.borrowed == ({self.names[0]: lent} if lent else {})


P = TypeVar("P", bound=Pair)


@contextmanager
def pair(
    fleet: FleetSettings, tmp_path: Path, make: Callable[[FleetSettings, Path], P] = Pair
) -> Iterator[P]:
    """Their stories are replayed at the end."""
    made = make(fleet, tmp_path / "story")
    lender, borrower = made.names
    with made.servers[lender], made.servers[borrower]:
        made.meet()
        yield made
    lives = read_device_stories(tmp_path / "story")
    assert sorted(life.device for life in lives) == [lender, borrower]
    for life in lives:
        found = replay(life)
        assert found.difference is None, found.difference
        assert found.stray is None


def settle(made: Pair) -> None:
    """Both loops have heard all that was said before."""
    for name in reversed(made.names):
        assert made.order(Recall("nobody", None, 1.0), name)().code == "refused"


def test_tokens_are_the_same_on_borrowed_pages(
    fleet: FleetSettings, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    with pair(fleet, tmp_path) as made:
        assert made.order(Lend(BORROWER, 60))().code is None
        settle(made)
        made.validate(60)
        with held(made.borrower, 100, "r7") as until_held:
            made.borrower.submit(*asked(10))
            until_held()
            assert made.borrower.device.state.models["base"].kv.borrowed.pages > 0
            outcome = made.order(Recall(BORROWER, 40, 60.0))
        assert outcome().code is None
        made.borrower.wait()
        settle(made)
        made.validate(20)
        assert {id: a.tokens for id, a in made.borrower.answers.items()} == expected
        assert made.order(Recall(BORROWER, None, 60.0))().code is None
        settle(made)
        made.validate(0)
        refused = made.order(Recall(BORROWER, None, 60.0))()
        assert (refused.code, refused.reason) == ("refused", f"nothing is lent to {BORROWER}")


def test_passes_wait_for_the_kv_that_they_read_and_write_on_borrowed_pages(
    fleet: FleetSettings, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    rate = 32.0 * MiB
    carried: dict[Direction, int] = dict.fromkeys(Direction, 0)
    with pair(replace(fleet, link=LinkSettings(peer_bytes_per_second=rate)), tmp_path) as made:
        link = made.borrower.device.machine.peer_link
        assert link is not None
        start = link.start

        def noted(number: int, copies: Any, stream: str, direction: Direction, **more: Any) -> None:
            assert more["in_place"], "nothing is copied"
            if stream != "moves":
                carried[direction] += sum(copy.n_bytes for copy in copies)
            start(number, copies, stream, direction, **more)

        link.start = noted  # type: ignore[method-assign]
        made.borrower.generate(asked(1))
        assert sum(carried.values()) == 0  # it has pages of its own
        assert made.order(Lend(BORROWER, 60))().code is None
        settle(made)
        began = time.monotonic()
        answers = made.borrower.generate(asked(10)[1:])
        seconds = time.monotonic() - began
        assert {id: a.tokens for id, a in answers.items()}.items() <= expected.items()
        link.start = start  # type: ignore[method-assign]
    read, written = carried[Direction.TO_DEVICE], carried[Direction.TO_HOST]
    assert read > written > 0
    assert seconds > read / rate - 0.1


def test_on_borrowed_pages_more_requests_run_at_once(fleet: FleetSettings, tmp_path: Path) -> None:
    def jobs(lent: int) -> int:
        (tmp_path / str(lent)).mkdir()
        with pair(fleet, tmp_path / str(lent)) as made:
            if lent:
                assert made.order(Lend(BORROWER, lent))().code is None
                settle(made)
            made.borrower.generate(asked(10))
            return made.borrower.device.snapshot().jobs

    assert jobs(100) < jobs(0)


def test_a_dead_lenders_memory_is_let_go_of(
    fleet: FleetSettings, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    with pair(fleet, tmp_path) as made:
        assert made.order(Lend(BORROWER, 60))().code is None
        settle(made)
        with held(made.borrower, 50, "r7") as until_held:
            made.borrower.submit(*asked(10))
            until_held()
            made.borrower.device.post(PeerGoneEvent(LENDER, 1))
        made.wait_for(lambda: made.said(PeerReleasedReport) == 1)
        made.servers[LENDER].device.post(PeerGoneEvent(BORROWER, 1))
        made.borrower.wait()
        settle(made)
        made.validate(0)
        assert {id: a.tokens for id, a in made.borrower.answers.items()} == expected
        assert made.said(PagesReturnedEvent) == 0


def test_whoever_does_not_return_pages_is_condemned_once(
    fleet: FleetSettings, tmp_path: Path
) -> None:
    with pair(fleet, tmp_path) as made:
        assert made.order(Lend(BORROWER, 8))().code is None
        made.deaf = True
        outcome = made.order(Recall(BORROWER, None, 0.05))
        made.wait_for(lambda: made.said(PeerOverdueReport) == 1)
        refused = made.order(Lend(BORROWER, 1))()
        assert refused.code == "refused"
        made.servers[LENDER].device.post(PeerGoneEvent(BORROWER, 1))
        assert outcome().code is None
        made.borrower.device.post(PeerGoneEvent(LENDER, 1))
        settle(made)
        made.validate(0)
        assert made.said(PeerOverdueReport) == 1


def test_a_lender_that_is_short_itself_recalls_what_it_lacks(
    fleet: FleetSettings, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    with pair(fleet, tmp_path) as made:
        lender = made.servers[LENDER]
        free = lender.device.snapshot().free
        assert made.order(Lend(BORROWER, free))().code is None
        result = lender.generate(asked(2))
        assert {id: a.tokens for id, a in result.items()} == {
            id: expected[id] for id in ("r0", "r1")
        }
        settle(made)
        lent = lender.device.state.lending.lent[BORROWER]
        assert 0 < lent < free
        made.validate(lent)


def test_copies_of_borrowed_kv_are_read_in_slots(
    fleet: FleetSettings, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Tokens are the same; where slots get zeros in place of copies, they are not."""
    copied: dict[bool, int] = dict.fromkeys((True, False), 0)
    link = LinkSettings(peer_bytes_per_second=1e9, peer_slot_bytes=64 * KiB)
    with pair(replace(fleet, link=link), tmp_path) as made:
        peers = made.borrower.device.machine.peer_link
        assert peers is not None
        start = peers.start

        def noted(number: int, copies: Any, *rest: Any, in_place: bool, **more: Any) -> None:
            copied[in_place] += sum(copy.n_bytes for copy in copies)
            start(number, copies, *rest, in_place=in_place, **more)

        peers.start = noted  # type: ignore[method-assign]
        assert made.order(Lend(BORROWER, 60))().code is None
        settle(made)
        answers = made.borrower.generate(asked(10))
        assert {id: a.tokens for id, a in answers.items()} == expected
        assert copied[False] > 0
        assert copied[True] > 0  # blocks that are being written, and what slots have no room for
        peers._copy_bytes = lambda dst, src, n: ctypes.memset(dst, 0, n)
        again = made.borrower.generate([replace(r, id=f"{r.id} again") for r in asked(10)])
        wrong = [a.tokens != expected[id.removesuffix(" again")] for id, a in again.items()]
        assert any(wrong)
