"""What was made of the same files is not made again, and what was made of others never taken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ballast.cluster.segment_broker import SegmentBroker
from ballast.core.errors import CheckpointError
from ballast.core.settings import ModelSettings
from ballast.weights import origin
from ballast.weights.assemble import Sources
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier
from tests.cluster.test_segment_broker import tier
from tests.weights.test_checkpoint import STORED, contents, make
from tests.weights.test_host import allocated, only_its_own  # noqa: F401

Reads = list[int]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was written a moment ago was so long ago."""
    now = time.time
    monkeypatch.setattr(origin.time, "time", lambda: now() + 60.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """One for each read of a part of a tensor."""
    result: Reads = []
    fill = Sources.fill

    def counted(self: Sources, *how: object) -> None:
        result.append(1)
        fill(self, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(Sources, "fill", counted)
    return result


def load(path: Path, at: HostTier, **settings: object) -> HostModel:
    chosen = ModelSettings(name="m", path=str(path), **{**STORED, **settings})  # type: ignore[arg-type]
    host = load_host_model(chosen, at)
    at.forget("m")  # its segments are found by their origin alone
    return host


@contextlib.contextmanager
def two_workers() -> Iterator[tuple[HostTier, HostTier]]:
    broker = SegmentBroker()
    with tier(broker) as (first, _), tier(broker) as (second, _):
        yield first, second


def in_workers(do: Callable[[HostTier, HostTier], None]) -> None:
    """On a thread, while the event loop answers for the broker."""

    async def scenario() -> None:
        with two_workers() as tiers:
            await asyncio.to_thread(do, *tiers)

    asyncio.run(scenario())


def change_in_place(file: Path) -> None:
    """The same size, and the times that a program can set as they were."""
    before = file.stat()
    tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
    while file.stat().st_ctime_ns == before.st_ctime_ns:
        other = file.with_name("other")
        save_file(tensors, other, {"format": "pt"})
        with open(file, "r+b") as open_file:
            open_file.write(other.read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def replace_by_another(file: Path) -> None:
    """As a download does it."""
    other = file.with_name("other")
    save_file({n: t + 1 for n, t in load_file(file).items()}, other, {"format": "pt"})
    os.replace(other, file)


@pytest.mark.usefixtures("later")
def test_what_another_worker_made_of_the_same_files_is_not_read(
    tmp_path: Path, reads: Reads
) -> None:
    expected = make(tmp_path).state_dict()

    def scenario(first: HostTier, second: HostTier) -> None:
        a = load(tmp_path, first)
        assert reads
        reads.clear()
        b, again = load(tmp_path, second), load(tmp_path, first)
        assert not reads
        assert a.spec == b.spec == again.spec
        for host in (b, again):
            found = contents(host)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        inodes = [[os.fstat(fd).st_ino for fd in host.memory.files()] for host in (a, b, again)]
        assert inodes[0] == inodes[1] == inodes[2]
        for host in (a, again):
            host.close()
        assert first.n_bytes == 0
        back = load(tmp_path, first)
        assert not reads
        b.close()
        back.close()
        patience = time.monotonic() + 240.0
        while allocated() and time.monotonic() < patience:
            time.sleep(0)  # the broker lets go when it hears of it
        assert allocated() == 0
        load(tmp_path, second).close()
        assert reads  # nobody had it any more

    in_workers(scenario)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("change", [change_in_place, replace_by_another])
def test_a_file_that_has_changed_is_read_again(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    make(tmp_path)
    file = tmp_path / "model.safetensors"

    def scenario(first: HostTier, second: HostTier) -> None:
        a = load(tmp_path, first)
        change(file)
        stored = load_file(file)
        for at in (second, first):
            b = load(tmp_path, at)
            assert b.spec.fingerprint != a.spec.fingerprint
            found = contents(b)
            assert all(torch.equal(found[name], stored[name]) for name in stored)
            b.close()
        a.close()

    in_workers(scenario)


@pytest.mark.usefixtures("later")
def test_a_file_that_changes_while_it_is_read_is_refused_and_known_to_be_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    file = tmp_path / "model.safetensors"
    fill, changed = Sources.fill, []

    def meanwhile(self: Sources, *how: object) -> None:
        fill(self, *how)  # type: ignore[arg-type]
        if not changed:
            changed.append(1)
            change_in_place(file)

    monkeypatch.setattr(Sources, "fill", meanwhile)

    def scenario(first: HostTier, second: HostTier) -> None:
        with pytest.raises(CheckpointError, match="changed while they were read"):
            load(tmp_path, first)
        whole = load(tmp_path, second)
        stored = load_file(file)
        found = contents(whole)
        assert all(torch.equal(found[name], stored[name]) for name in stored)
        whole.close()

    in_workers(scenario)


def test_a_file_that_was_just_written_is_read_by_everyone(tmp_path: Path, reads: Reads) -> None:
    make(tmp_path)
    os.utime(tmp_path / "model.safetensors", (0, 0))  # what a program can say does not count

    def scenario(first: HostTier, second: HostTier) -> None:
        a = load(tmp_path, first)
        reads.clear()
        b = load(tmp_path, second)
        assert reads
        assert b.spec == a.spec
        a.close()
        b.close()

    in_workers(scenario)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"linear": "auto"}, {"linear": "auto", "model_impl": "auto"}]
)
def test_what_is_made_otherwise_of_the_same_files_is_something_else(
    tmp_path: Path, other: dict[str, str], reads: Reads
) -> None:
    make(tmp_path)

    def scenario(first: HostTier, second: HostTier) -> None:
        a = load(tmp_path, first)
        reads.clear()
        b = load(tmp_path, second, **other)
        assert reads
        alone = load(tmp_path, HostTier(), **other)
        assert b.memory.digests == alone.memory.digests != a.memory.digests
        for host in (a, b, alone):
            host.close()

    in_workers(scenario)
