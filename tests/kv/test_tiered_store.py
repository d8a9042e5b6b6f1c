"""KV on disk: found again, bounded, private; whatever is wrong with it, it is computed again."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.errors import DeviceError
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.units import KiB
from ballast.kv import disk_file, tiered_store
from ballast.kv.directory import Tier
from ballast.kv.disk_file import NAME, DiskFile
from ballast.kv.tier_shelf import KvBlock
from ballast.kv.tiered_store import TieredStore
from ballast.memory import host_cells
from ballast.memory.cell_book import CELL_BYTES, Runs
from ballast.memory.host_cells import HostCells
from tests.kv.test_directory import MODEL, chain, found, memory_only, names, put


class Opened:
    """A store whose disk's answers are taken by `turn`."""

    def __init__(self, path: Path, host: int, disk: int, tenants: set[str] | None) -> None:
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        sizes = KvTierSettings(
            host_bytes=host * CELL_BYTES, disk_path=str(path), disk_bytes=disk * CELL_BYTES
        )
        self.store = TieredStore.create(sizes, self.calls.put, tenants, threaded=False)

    def turn(self, n: int = 1) -> None:
        for _ in range(n):
            self.calls.get(timeout=240)()

    @property
    def cells(self) -> HostCells:
        assert isinstance(self.store.cells, HostCells)
        return self.store.cells

    def put(self, blocks: list[KvBlock]) -> None:
        """Store blocks, each with bytes of its own, and have them written."""
        assert self.land(blocks) == len(blocks)
        self.settle()

    def land(self, blocks: list[KvBlock]) -> int:
        """Store blocks on the host, as far as there is room; until `turn` only the first is written
        to disk. Returns how many there was room for."""
        n = 0
        for block in blocks:
            (runs,) = self.store.reserve("w", [block])
            if runs is not None:
                n += 1
                data = content(block)
                self.cells.write(runs, data)
                self.store.land("w", block.name, zlib.crc32(data))
        return n

    def settle(self) -> None:
        """Have all be written that waits for the disk."""
        while self.store._is_writing:
            self.turn()

    def got(self, blocks: list[KvBlock]) -> list[bytes]:
        """Fetch a chain, as far as it is there."""
        ended = threading.Event()
        self.store.stage(MODEL, names(blocks), ended.set)
        while not ended.is_set():
            self.turn()
        slots = self.store.fetch("w", MODEL, names(blocks))
        found = [self.cells.read(slot.runs, slot.n_bytes) for slot in slots]
        self.store.release("w", names(blocks)[: len(slots)])
        self.store.validate()
        return found


def content(block: KvBlock) -> bytes:
    return block.name * (block.n_bytes // len(block.name))


@contextmanager
def opened(
    path: Path, host: int = 16, disk: int = 64, tenants: set[str] | None = None
) -> Iterator[Opened]:
    made = Opened(path, host, disk, tenants)
    try:
        yield made
        made.store.validate()
    finally:
        made.store.close()


def _file(made: Opened) -> sqlite3.Connection:
    """The disk's connection, of which this test takes another's part."""
    assert made.store._disk is not None
    return made.store._disk._file._file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_kv_is_found_again_after_a_restart(path: Path) -> None:
    blocks = chain("a", 20)
    with opened(path) as first:
        first.put(blocks[:10])
        first.put(chain("b", 12))  # what leaves the host is on disk
        assert "d" in first.store.look_up(MODEL, names(blocks))
        assert first.got(blocks) == [content(b) for b in blocks[:10]]
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / NAME).stat().st_mode & 0o777 == 0o600
    with opened(path) as second:
        assert second.store.look_up(MODEL, names(blocks)) == "d" * 10
        assert second.got(blocks) == [content(b) for b in blocks[:10]]
        assert second.store.look_up(MODEL, names(blocks)) == "h" * 10


def test_what_leaves_the_host_before_it_could_be_written_is_written_first(path: Path) -> None:
    """Up to half of the host tier; the rest is for what comes next."""
    waiting, others = chain("a", 8), [chain(f"x{i}", 1)[0] for i in range(40)]
    with opened(path, host=16) as made:
        made.land(waiting)
        assert made.land(others) == 40, "there is room for what comes next"
        assert made.got(waiting[1:]) == [content(b) for b in waiting[1:]]
        assert made.store.counts.evicted == 32
        made.store.resize(0)
        assert made.store.look_up(MODEL, names(waiting)) == "h" * 8, "it has not been written yet"
        made.settle()
        assert made.store.look_up(MODEL, names(waiting)) == "d" * 8
        assert not made.store.directory.shelves[Tier.HOST]
        assert made.store._behind.kept_bytes == 0


def test_what_waits_for_the_disk_is_written_as_the_server_ends(path: Path) -> None:
    blocks = chain("a", 70)
    with opened(path, host=100, disk=200) as made:
        made.land(blocks)
    with opened(path, host=100, disk=200) as made:
        assert made.got(blocks) == [content(b) for b in blocks]


def test_a_disk_too_slow_for_what_waits_at_the_end_loses_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, late = chain("a", 4), chain("b", 10)
    with opened(path) as made:
        made.put(kept)
    go, read = threading.Event(), HostCells.read

    def slow(cells: HostCells, runs: Runs, n_bytes: int) -> bytes:
        go.wait(240)
        return read(cells, runs, n_bytes)

    monkeypatch.setattr(HostCells, "read", slow)
    monkeypatch.setattr(tiered_store, "LAST_SECONDS", 0.01)
    made = Opened(path, 16, 64, None)
    made.land(late)
    made.store.close()
    go.set()
    assert made.store._disk is not None
    made.store._disk._thread.shutdown(wait=True)
    assert not made.store.disk_fault
    _file(made).close()
    made.cells.close()
    with opened(path) as made:
        assert made.got(kept) == [content(b) for b in kept]
        assert len(made.store.directory.shelves[Tier.DISK]) == 5, "it had begun with one"


def test_what_waits_for_the_disk_is_scrubbed_and_lost_with_it(path: Path) -> None:
    with opened(path) as made:
        made.land(chain("a", 7))
        made.store.scrub(model="finger")
        assert made.cells.used == 1, "the disk's thread reads it"
        made.settle()
        assert (made.cells.used, made.store._behind.kept_bytes) == (0, 0)
        made.land(chain("b", 7))
        made.store.give_up_disk("it does not answer")
        assert made.store._behind.kept_bytes == 0
        made.settle()
        assert made.land([chain(f"x{i}", 1)[0] for i in range(16)]) == 16


def test_it_is_bounded(path: Path) -> None:
    with opened(path, host=8, disk=12) as made:
        for i in range(6):
            made.put(chain(f"c{i}", 8))
        assert made.store.directory.shelves[Tier.DISK].n_bytes <= 12 * CELL_BYTES
        assert not made.store.disk_fault
    assert (path / NAME).stat().st_size <= 1.1 * 12 * CELL_BYTES + 65 * 32 * KiB
    with opened(path, disk=4) as made:  # it is given less
        assert len(made.store.directory.shelves[Tier.DISK]) == 4
    with opened(path, disk=64) as made:
        assert len(made.store.directory.shelves[Tier.DISK]) == 4, "others are in the file no more"


def test_its_size_can_be_changed_while_it_is_used(path: Path) -> None:
    with opened(path, host=32, disk=12) as made:
        made.put(chain("a", 10))
        made.store.resize_disk(4 * CELL_BYTES)
        made.turn()  # the others have been deleted
        shelf = made.store.directory.shelves[Tier.DISK]
        assert (len(shelf), shelf.capacity) == (4, 4 * CELL_BYTES)
        made.store.resize_disk(100 * CELL_BYTES)
        assert shelf.capacity == 12 * CELL_BYTES, "the file was made for no more"
        made.put(chain("b", 8))
        assert len(shelf) == 12
    with opened(path, disk=12) as made:
        assert len(made.store.directory.shelves[Tier.DISK]) == 12


def test_keys_that_are_gone_and_scrubbed_models_leave_nothing(path: Path) -> None:
    mine, theirs, shared = chain("m", 3, "me"), chain("t", 3, "they"), chain("s", 3)
    with opened(path) as made:
        for blocks in (mine, theirs, shared):
            made.put(blocks)
    secret = theirs[0].name * 8
    assert secret in (path / NAME).read_bytes()
    with opened(path, tenants={"me"}) as made:
        assert made.got(theirs) == []
        assert len(made.got(mine)) == 3
    assert secret not in (path / NAME).read_bytes()
    with opened(path, tenants={"me"}) as made:
        assert made.store.scrub_others(["finger", "another"]) == 0
        assert made.store.scrub_others(["another"]) == 6
    rest = (path / NAME).read_bytes()
    assert mine[0].name * 8 not in rest
    assert shared[0].name * 8 not in rest


@pytest.mark.parametrize("how", ["truncated", "overwritten", "another version", "not a database"])
def test_what_is_unusable_is_computed_again(
    path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain("a", 12)
    with opened(path) as made:
        made.put(blocks)
    file = path / NAME
    size = file.stat().st_size
    if how == "truncated":
        os.truncate(file, size // 2)
    elif how == "overwritten":
        data = bytearray(file.read_bytes())
        at = data.index(content(blocks[5])[:1000])
        data[at + 40 : at + 44] = b"torn"
        file.write_bytes(data)
    elif how == "another version":
        monkeypatch.setattr(disk_file, "FORMAT", "another")
    else:
        file.write_bytes(os.urandom(size))
    with caplog.at_level(logging.WARNING), opened(path) as made:
        got = made.got(blocks)
        assert got == [content(b) for b in blocks[: len(got)]]
        assert len(got) < 12
        assert len(got) == 5 or how != "overwritten"
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING and "KV" in r.message]
    assert len(warned) == 1
    with opened(path) as made:  # it goes on
        made.put(chain("new", 4))
        assert len(made.got(chain("new", 4))) == 4


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=60)), max_size=8))
def test_no_damage_of_the_file_gives_a_wrong_block_or_keeps_a_server_from_starting(
    damage: list[tuple[float, bytes]],
) -> None:
    blocks, others = chain("a", 6), chain("b", 4)
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "kv"
        with opened(path) as made:
            made.put(blocks)
        data = bytearray((path / NAME).read_bytes())
        for where, what in damage:
            # Heads of pages say where everything is: half of the damage is there.
            at = int(where * len(data)) if len(what) % 2 else int(where * 8) * 32 * KiB
            data[at : at + len(what)] = what
        (path / NAME).write_bytes(data)
        for _ in range(2):
            with opened(path) as made:
                got = made.got(blocks)
                assert got == [content(b) for b in blocks[: len(got)]]
                made.put(others)
                assert made.got(others) == [content(b) for b in others]


def test_rows_that_no_server_has_written_are_not_used(path: Path) -> None:
    blocks = chain("a", 3)
    for column, value in (
        ("n_bytes", "'x'"),
        ("n_bytes", -5),
        ("name", "NULL"),
        ("model", "x'05'"),
    ):
        with opened(path) as made:
            made.put(blocks)
        with sqlite3.connect(path / NAME) as file:
            file.execute(f"UPDATE blocks SET {column} = {value} WHERE rowid = 2")
        file.close()
        with opened(path) as made:
            assert made.got(blocks) == []


def test_a_file_that_changes_while_it_is_used_gives_no_wrong_block(path: Path) -> None:
    blocks = chain("a", 40)
    with opened(path, host=40) as made:
        made.put(blocks)
    with opened(path, host=8) as made:
        os.truncate(path / NAME, 3 * 32 * KiB)
        got = made.got(blocks)
        assert got == [content(b) for b in blocks[: len(got)]]
        made.got(chain("b", 3))
        made.store.validate()


@pytest.mark.parametrize("how", ["deleted", "read-only", "replaced", "unreadable"])
def test_a_disk_that_fails_is_given_up_once_and_keeps_nothing(
    path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = chain("a", 6)
    with caplog.at_level(logging.WARNING), opened(path) as made:
        made.put(blocks)
        if how == "deleted":
            shutil.rmtree(path)
        elif how == "read-only":
            _file(made).execute("PRAGMA query_only = ON")
        elif how == "replaced":
            (path / NAME).unlink()
            (path / NAME).write_bytes(b"another server's")
        else:
            monkeypatch.setattr(DiskFile, "write", Mock(side_effect=MemoryError("none left")))
        made.put(chain("b", 3))
        assert made.store.disk_fault
        assert not made.store.disk_keeps
        assert made.got(blocks) == [content(b) for b in blocks], "what the host has stays"
        made.put(chain("c", 1))
    assert len(caplog.records) == 1
    left = (path / NAME).read_bytes() if (path / NAME).exists() else b""
    assert left in (b"", b"another server's"), "nobody would scrub it"


def test_a_disk_that_is_read_only_from_the_start_is_left_out_and_said(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier server wrote there stays, which whoever scrubs must know; not what another
    server uses now."""
    blocks = chain("a", 3)
    open_file = os.open

    def read_only(file: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(file, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        with opened(path) as made:
            assert "Read-only" in made.store.disk_fault
            assert not made.store.disk_keeps, "there is nothing"
    with opened(path) as first:
        first.put(blocks)
        with opened(path) as second:
            assert "in use by a server" in second.store.disk_fault
            assert not second.store.disk_keeps
            assert second.store.scrub(model="finger") == 0
        assert first.got(blocks) == [content(b) for b in blocks]
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        with opened(path) as made:
            made.put(blocks)
            assert made.got(blocks) == [content(b) for b in blocks], "the host keeps them"
            assert made.store.disk_keeps
    (record,) = caplog.records
    assert "Read-only" in record.message
    with opened(path) as made:
        assert made.store.scrub(model="finger") == 3
    with opened(path) as made:
        assert made.got(blocks) == []


def test_a_disk_that_cannot_be_cleaned_says_so_to_who_scrubs(path: Path) -> None:
    with opened(path) as made:
        made.put(chain("a", 2))
        with patch.object(DiskFile, "discard", return_value=False):
            _file(made).execute("PRAGMA query_only = ON")
            made.put(chain("b", 2))
            keeps = made.store.disk_keeps
            assert keeps
        made.store.scrub(tenant="x")
        made.store._delete([b"any"])  # tried again with the next order
        made.turn()
        assert not made.store.disk_keeps
    assert not (path / NAME).exists()


def test_a_full_disk_keeps_what_it_has_room_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), opened(path, host=40, disk=64) as made:
        made.put(chain("a", 12))
        _file(made).execute("PRAGMA max_page_count = 1")  # as many as there are
        for i in range(5):
            made.put(chain(f"b{i}", 6))
        assert not made.store.disk_fault
        shelf = made.store.directory.shelves[Tier.DISK]
        assert 0 < len(shelf) <= 12
        made.put(chain("last", 3))
    assert len(caplog.records) == 1
    with opened(path) as made:
        assert len(made.store.directory.shelves[Tier.DISK]) == len(shelf)
        assert made.got(chain("last", 3)) == [content(b) for b in chain("last", 3)]


def test_one_bad_block_costs_the_disk_no_other(path: Path) -> None:
    blocks = chain("a", 4)
    with opened(path) as made:
        made.store._is_writing = True  # all of them in one batch
        for block in blocks:
            (runs,) = made.store.reserve("w", [block])
            assert runs is not None
            made.cells.write(runs, content(block))
            made.store.land("w", block.name, zlib.crc32(content(block)) + (block is blocks[2]))
        made.store._is_writing = False
        made.store._write_behind()
        made.turn()
        assert [made.store.directory.has(b.name, Tier.DISK) for b in blocks] == [1, 1, 0, 1]


@pytest.mark.parametrize("version", ["the same version", "another version"])
def test_two_servers_do_not_share_a_directory(
    path: Path,
    version: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(path) as first, ExitStack() as closing:
        if version == "another version":
            monkeypatch.setattr(disk_file, "FORMAT", "another")
        with caplog.at_level(logging.WARNING):
            second = closing.enter_context(opened(path))
        assert "in use by a server" in caplog.text
        blocks = chain("a", 4)
        second.put(blocks)
        first.put(blocks)
        assert second.got(blocks) == first.got(blocks)


def test_a_host_with_less_memory_than_was_promised_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enough = iter([1 << 40] * 2)  # steps of 128 cells
    monkeypatch.setattr(host_cells, "available", lambda: (next(enough, 0), 0))
    with caplog.at_level(logging.WARNING):
        store = memory_only(400 * CELL_BYTES)
        for i in range(12):
            put(store, chain(f"c{i}", 60))
    assert store.cells.used <= 256
    assert found(store, chain("c11", 60)) == 60
    assert len(caplog.records) == 1
    store.validate()
    store.close()


def test_links_and_strangers_directories_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(DeviceError, match="link"):
        DiskFile(tmp_path / "link", 1 << 20)
    (tmp_path / "real" / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError):
        DiskFile(tmp_path / "real", 1 << 20)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError):
        DiskFile(tmp_path / "file", 1 << 20)


def test_the_file_is_not_mapped(path: Path) -> None:
    """A file that is truncated under a mapping kills the process."""
    file = DiskFile(path, 1 << 20)
    assert file._file.execute("PRAGMA mmap_size").fetchone() in (None, (0,))
    assert isinstance(file._file, sqlite3.Connection)
    assert NAME not in Path("/proc/self/maps").read_text()
    file.close()
