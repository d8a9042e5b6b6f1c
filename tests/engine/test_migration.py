"""A request moves between two live devices with its KV: no token changes, whatever goes wrong."""

from __future__ import annotations

import ctypes
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.actions import EvictCommand
from ballast.core.event import CancelledOutput, FinishedOutput
from ballast.core.migration import (
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvReadEvent,
    KvTailEvent,
    MigrationAnswer,
)
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import KiB, MiB
from ballast.memory.peer_reader import PeerReader
from ballast.memory.vm import Exported
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import VOCAB, make_llama
from tests.engine.holding import DEADLINE, held, until

NAMES = ("cpu:0", "cpu:1")
BLOCK = 16
PROMPT, OUTPUT = 41, 90


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "base", 1)


def fleet(path: Path, name: str, story: Path, **device: Any) -> FleetSettings:
    settings = DeviceSettings(
        name=name,
        budget_bytes=64 * MiB,
        page_bytes=64 * KiB,
        step_tokens=32,
        step_logits=8,
        threads=1,
        **device,
    )
    models = (ModelSettings(name="base", path=str(path), dtype="float32", block_tokens=BLOCK),)
    return FleetSettings(models=models, device=settings, story_path=str(story))


def asked(name: str, **sampling: Any) -> Submission:
    prompt = tuple((11 * k + 5) % VOCAB for k in range(PROMPT))
    return Submission(
        id=name,
        model="base",
        prompt=prompt,
        max_tokens=OUTPUT,
        sampling=Sampling(**sampling),
        ignore_eos=True,
    )


class Two:
    """Devices and what they say, by device."""

    def __init__(self, path: Path, story: Path, **device: Any) -> None:
        self.servers = {n: InProcess(fleet(path, n, story, **device)) for n in NAMES}
        self.source, self.target = (self.servers[n] for n in NAMES)
        self.words: queue.SimpleQueue[MigrationAnswer] = queue.SimpleQueue()
        for server in self.servers.values():
            moves = server.device.state.migration
            moves.bytes, moves.exports = PeerReader(self._fetch, server.device.post), True
            server.device.set_migration_outbox(self.words.put)

    def _fetch(self, name: str) -> Exported:
        exported = self.servers[name].device.export()
        assert exported is not None
        assert exported.fd is not None
        return replace(exported, fd=os.dup(exported.fd))

    def ask(
        self, server: InProcess, order: ExportKvEvent | DepartEvent | ImportKvEvent
    ) -> MigrationAnswer:
        server.device.migrate(order)
        return self.received()

    def received(self) -> MigrationAnswer:
        return self.words.get(timeout=DEADLINE)

    def copied(self, s: Submission) -> KvExportedAnswer:
        """What is there of a request's KV, once the target has it."""
        exported = self.ask(self.source, ExportKvEvent(s.id))
        assert isinstance(exported, KvExportedAnswer)
        tokens = (*s.prompt, *self.source.answers[s.id].tokens)[: exported.tokens]
        wanted = replace(s, prompt=tokens, max_tokens=0)
        order = ImportKvEvent(wanted, exported.form, NAMES[0], exported.pieces)
        assert self.ask(self.target, order) == KvImportedAnswer(s.id, exported.tokens)
        return exported

    @contextmanager
    def amid(self, s: Submission, token: int = 30) -> Iterator[None]:
        """The source holds its jobs once it has told that token of a request."""
        with held(self.source, token, s.id) as until_held:
            self.source.submit(s)
            until_held()
            yield

    def arrive(self, s: Submission) -> list[int]:
        """The request goes on at the target to its end; all of its tokens."""
        before = self.source.answers[s.id].tokens
        self.target.generate([replace(s, resumed=tuple(before))])
        end = self.target.answers[s.id].end
        assert isinstance(end, FinishedOutput)
        return [*before, *self.target.answers[s.id].tokens]

    def validate(self) -> None:
        """Both are quiet: their books agree, and nothing is held for anybody."""
        for server in self.servers.values():
            server.device.state.pool.validate()
            for m in server.device.state.models.values():
                m.kv.validate([])

    @property
    def found(self) -> int:
        """Tokens whose KV the target did not compute."""
        return self.target.device.state.models["base"].kv.prefixes.hit_tokens


@contextmanager
def two(path: Path, tmp_path: Path, **device: Any) -> Iterator[Two]:
    """Their stories are replayed at the end."""
    made = Two(path, tmp_path / "story", **device)
    with made.source, made.target:
        made.target.generate([replace(asked("first"), max_tokens=1, salt="other")])  # weights come
        yield made
    lives = read_device_stories(tmp_path / "story")
    assert sorted(life.device for life in lives) == list(NAMES)
    for life in lives:
        found = replay(life)
        assert found.difference is None, found.difference
        assert found.stray is None


@pytest.fixture(scope="module")
def expected(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    server = InProcess(fleet(path, "alone", tmp_path_factory.mktemp("alone") / "story"))

    def tokens(**sampling: Any) -> list[int]:
        name = f"alone {sampling}"
        with InProcess(server.device.fleet) as fresh:
            return fresh.generate([asked(name, **sampling)])[name].tokens

    server.device.close()
    return tokens


PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": ((5, 3.0),)}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 5},
    "penalised": {"temperature": 1.1, "seed": 6, **PENALISED},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_request_goes_on_with_its_kv(
    path: Path, tmp_path: Path, expected: Callable[..., list[int]], way: str
) -> None:
    """It departs when a block has filled: the target computes nothing that was computed before."""
    s = asked("r", **WAYS[way])
    with two(path, tmp_path) as made:
        before = made.found
        with made.amid(s):
            exported = made.copied(s)
            assert exported.tokens == (PROMPT + 30) // BLOCK * BLOCK
            made.source.device.migrate(DepartEvent("r"))
        departed = made.received()
        made.source.wait()
        assert isinstance(departed, DepartedAnswer)
        assert departed.intact
        assert isinstance(made.source.answers["r"].end, CancelledOutput)
        known = PROMPT + len(made.source.answers["r"].tokens)
        assert (known - 1) % BLOCK == 0
        assert exported.tokens + departed.tokens == known - 1
        made.target.device.migrate(KvTailEvent("r", departed.tokens, departed.tail))
        assert made.arrive(s) == expected(**WAYS[way])
        assert made.found - before == known - 1
        until(lambda: not made.source.device.state.requests)
        made.validate()


def test_a_request_that_lost_its_blocks_meanwhile_goes_on_without_them(
    path: Path, tmp_path: Path, expected: Callable[..., list[int]]
) -> None:
    s = asked("r")
    with two(path, tmp_path) as made:
        before = made.found
        with made.amid(s):
            made.copied(s)
            made.source.device.command(EvictCommand("base", "a test"), lambda outcome: None)
        until(lambda: len(made.source.answers["r"].tokens) > 36)
        departed = made.ask(made.source, DepartEvent("r"))
        assert departed == DepartedAnswer("r", intact=False)
        made.source.wait()
        made.target.device.migrate(DropKvEvent("r"))
        assert made.arrive(s) == expected()
        assert made.found == before
        made.validate()


def test_a_target_without_room_or_weights_imports_nothing(
    path: Path, tmp_path: Path, expected: Callable[..., list[int]]
) -> None:
    """The source goes on."""
    s = asked("r")
    with two(path, tmp_path) as made:
        with made.amid(s):
            exported = made.ask(made.source, ExportKvEvent("r"))
            assert isinstance(exported, KvExportedAnswer)
            tokens = (*s.prompt, *made.source.answers["r"].tokens)[: exported.tokens]
            wanted = replace(s, prompt=tokens, max_tokens=0)
            orders = {
                "another form": ImportKvEvent(wanted, "another", NAMES[0], exported.pieces),
                "half a block": ImportKvEvent(
                    replace(wanted, prompt=tokens[:-3]), exported.form, NAMES[0], exported.pieces
                ),
                "no such model": ImportKvEvent(
                    replace(wanted, model="none"), exported.form, NAMES[0], exported.pieces
                ),
                "too little": ImportKvEvent(wanted, exported.form, NAMES[0], exported.pieces[:-1]),
            }
            for what, order in orders.items():
                assert made.ask(made.target, order) == KvImportedAnswer("r", 0), what
            whole = ImportKvEvent(wanted, exported.form, NAMES[0], exported.pieces)
            state = made.target.device.state
            made.target.device.command(EvictCommand("base", "a test"), lambda outcome: None)
            until(lambda: not state.models["base"].weights.backed)
            assert made.ask(made.target, whole) == KvImportedAnswer("r", 0)
            assert made.ask(made.source, ExportKvEvent("none")) == KvExportedAnswer("none", 0)
        made.source.wait()
        assert made.source.answers["r"].tokens == expected()
        assert made.ask(made.source, DepartEvent("r")) == DepartedAnswer("r", intact=False)
        made.validate()


def test_what_was_imported_goes_with_its_model(path: Path, tmp_path: Path) -> None:
    """Nothing holds it, as nothing holds what is cached: the request is computed anew."""
    s = asked("r")
    with two(path, tmp_path) as made:
        with made.amid(s):
            made.copied(s)
            m = made.target.device.state.models["base"]
            assert m.kv.counts.used_blocks == (PROMPT + 30) // BLOCK
            made.target.device.command(EvictCommand("base", "a test"), lambda outcome: None)
            until(lambda: not m.kv.pages)
            made.source.cancel("r")
        made.source.wait()
        made.target.generate([replace(s, resumed=tuple(made.source.answers["r"].tokens))])
        made.validate()


def test_a_request_that_ends_does_not_depart(path: Path, tmp_path: Path) -> None:
    s = replace(asked("r"), max_tokens=40)
    with two(path, tmp_path) as made:
        with made.amid(s, 37):
            made.copied(s)
            # 41 tokens of prompt and 39 more are five blocks: it has ended by then.
            made.source.device.migrate(DepartEvent("r"))
            made.source.cancel("r")
        assert made.received() == DepartedAnswer("r", intact=False)
        made.source.wait()
        made.target.device.migrate(DropKvEvent("r"))
        made.target.generate([replace(asked("last"), max_tokens=1)])
        made.validate()


def test_an_arrival_that_is_refused_gives_back_what_was_imported(
    path: Path, tmp_path: Path
) -> None:
    s = asked("r")
    with two(path, tmp_path) as made:
        with made.amid(s):
            made.copied(s)
            made.source.cancel("r")
        made.source.wait()
        made.target.generate([replace(s, max_tokens=10_000)])
        made.validate()


def test_a_reader_copies_bytes_in_order_or_says_why_not() -> None:
    posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    memory = os.memfd_create("source")
    os.pwrite(memory, bytes(range(256)) * 16, 0)

    def fetch(name: str) -> Exported:
        return Exported((0, 0), 4096, 1, (), None if name == "a GPU" else os.dup(memory))

    reader = PeerReader(fetch, posted.put)
    here = bytearray(4096)
    address = ctypes.addressof((ctypes.c_char * 4096).from_buffer(here))
    reader.start("a", "cpu", [(0, 100), (300, 50)], [(address, 30), (address + 1000, 120)], 7)
    assert posted.get(timeout=DEADLINE) == KvReadEvent("a", attempt=7)
    source = bytes(range(256)) * 16
    assert here[:30] == source[:30]
    assert here[1000:1120] == source[30:100] + source[300:350]
    reader.start("b", "cpu", [(0, 100)], [(address, 99)], 1)
    assert "not of one size" in posted.get(timeout=DEADLINE).error
    reader.start("c", "a GPU", [(0, 100)], [(address, 100)], 1)
    assert "no file" in posted.get(timeout=DEADLINE).error
    reader.start("d", "cpu", [(4090, 100)], [(address, 100)], 1)
    assert "no memory" in posted.get(timeout=DEADLINE).error
    reader.start("e", "cpu", [(0, 100)], [(8, 100)], 1)
    assert "Bad address" in posted.get(timeout=DEADLINE).error
    reader.start("f", "cpu", [(0, 100)], [(address + 2000, 100)], 1)
    reader.stop("f")
    reader.start("g", "cpu", [(0, 10)], [(address + 3000, 10)], 1)
    assert posted.get(timeout=DEADLINE).request_id in "fg"  # it may have been quicker
    reader.close()
    os.close(memory)
