"""KV on disk: found again, bounded, private; whatever is wrong with it, it is computed again."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from ballast.core.errors import DeviceError
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.units import KiB
from ballast.kv import disk_file
from ballast.kv.directory import Tier
from ballast.kv.disk_file import NAME, DiskFile
from ballast.kv.tier_shelf import KvBlock
from ballast.kv.tiered_store import TieredStore
from ballast.memory.cell_book import CELL_BYTES
from ballast.memory.host_cells import HostCells
from tests.kv.test_directory import MODEL, chain, names


class Opened:
    """A store whose disk's answers are taken by `turn`."""

    def __init__(self, path: Path, host: int, disk: int, tenants: set[str] | None) -> None:
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        settings = KvTierSettings(
            host_bytes=host * CELL_BYTES, disk_path=str(path), disk_bytes=disk * CELL_BYTES
        )
        self.store = TieredStore.made(settings, self.calls.put, tenants, threaded=False)

    def turn(self, n: int = 1) -> None:
        for _ in range(n):
            self.calls.get(timeout=60)()

    @property
    def cells(self) -> HostCells:
        assert isinstance(self.store.cells, HostCells)
        return self.store.cells

    def put(self, blocks: list[KvBlock]) -> None:
        """Store blocks, each with bytes of its own, and have them written."""
        for block in blocks:
            (runs,) = self.store.reserve("w", [block])
            assert runs is not None
            data = content(block)
            self.cells.write(runs, data)
            self.store.land("w", block.name, zlib.crc32(data))
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


def test_it_is_bounded(path: Path) -> None:
    with opened(path, host=8, disk=12) as made:
        for i in range(6):
            made.put(chain(f"c{i}", 8))
        assert made.store.directory.shelves[Tier.DISK].n_bytes <= 12 * CELL_BYTES
        assert not made.store.disk_fault
    assert (path / NAME).stat().st_size <= 1.1 * 12 * CELL_BYTES + 65 * 32 * KiB
    with opened(path, disk=4) as made:  # it is given less
        assert len(made.store.directory.shelves[Tier.DISK]) <= 4
        made.store._disk.delete([])  # type: ignore[union-attr]


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
        assert made.store.scrub(model="finger") == 6
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
        found = made.got(blocks)
        assert found == [content(b) for b in blocks[: len(found)]]
        assert len(found) < 12
        assert len(found) == 5 or how != "overwritten"
    assert sum("KV" in record.message for record in caplog.records) == 1
    with opened(path) as made:  # it goes on
        made.put(chain("new", 4))
        assert len(made.got(chain("new", 4))) == 4


def test_a_file_that_changes_while_it_is_used_gives_no_wrong_block(path: Path) -> None:
    blocks = chain("a", 40)
    with opened(path, host=40) as made:
        made.put(blocks)
    with opened(path, host=8) as made:
        os.truncate(path / NAME, 3 * 32 * KiB)
        found = made.got(blocks)
        assert found == [content(b) for b in blocks[: len(found)]]
        made.got(chain("b", 3))
        made.store.validate()


def test_a_deleted_directory_and_a_full_disk_end_the_tier_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain("a", 6)
    with caplog.at_level(logging.WARNING), opened(path) as made:
        made.put(blocks)
        made.store._disk._file._file.execute("PRAGMA max_page_count = 1")  # type: ignore[union-attr]
        made.put(chain("b", 9))
        assert made.store.disk_fault
        assert made.got(blocks) == [content(b) for b in blocks], "what the host has stays"
        made.put(chain("c", 1))
    assert len(caplog.records) == 1


def test_two_servers_do_not_share_a_directory(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(path) as first, caplog.at_level(logging.WARNING), opened(path) as second:
        assert "in use by a server" in caplog.text
        blocks = chain("a", 4)
        second.put(blocks)
        first.put(blocks)
        assert second.got(blocks) == first.got(blocks)


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
