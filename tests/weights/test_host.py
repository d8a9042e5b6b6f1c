"""The host tier holds each distinct segment once, for as long as anyone needs it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import hashlib
import math
import os
from pathlib import Path

import pytest

from ballast.core.errors import DeviceError
from ballast.weights.host import HostBytes, HostTier
from ballast.weights.segment import PLAIN, PackedTensor, Piece, Segment, pack

ROWS = 5000


def tensor(name: str, *shape: int) -> PackedTensor:
    return PackedTensor((name,), shape, "float32", 0, 4 * math.prod(shape), PLAIN, (name,))


def segments(*names: str) -> list[Segment]:
    """Of two tensors each, 24 KB together."""
    return [pack(n, [tensor(f"{n}.w", ROWS), tensor(f"{n}.b", 1000)]) for n in names]


class Filler:
    """Fills each piece with a byte that its segment's value says; remembers the memory in use."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values
        self.peak = 0

    def __call__(self, piece: Piece) -> bytes:
        value = self.values[piece.tensor.names[0].partition(".")[0]]
        ctypes.memset(piece.address, value, piece.n_bytes)
        self.peak = max(self.peak, allocated())
        return hashlib.sha256(ctypes.string_at(piece.address, piece.n_bytes)).digest()


_others: set[int] = set()
"""Inodes of memfds that are not of the test under way."""


@pytest.fixture(autouse=True)
def only_its_own() -> None:
    """What tests before left to the garbage collector is not counted against this one."""
    gc.collect()
    _others.clear()
    _others.update(_memfds())


def allocated() -> int:
    """Bytes of the memfds of the host tier in this process that the test under way has made."""
    return sum(n for inode, n in _memfds().items() if inode not in _others)


def _memfds() -> dict[int, int]:
    """Bytes by inode."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:ballast-"):
                status = os.fstat(int(fd))
                found[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return found


def load(tier: HostTier, name: str, **values: int) -> HostBytes:
    return HostBytes(name, segments(*values), Filler(values), 2, tier)


def contents(held: HostBytes) -> list[int]:
    return [ctypes.string_at(address + 100, 1)[0] for address in held.addresses()]


def test_equal_segments_are_there_once_whatever_they_are_called() -> None:
    tier = HostTier()
    a = load(tier, "a", embed=1, one=2, two=3)
    alone = tier.n_bytes
    assert alone == allocated() == 3 * 24576
    b = load(tier, "b", tokens=1, eins=2, zwei=9)
    assert b.addresses()[:2] == a.addresses()[:2]
    assert b.digests[:2] == a.digests[:2]
    assert b.addresses()[2] != a.addresses()[2]
    assert a.digest != b.digest
    assert tier.n_bytes == allocated() == alone + 24576
    assert (contents(a), contents(b)) == ([1, 2, 3], [1, 2, 9])
    a.close()
    a.close()
    assert tier.n_bytes == allocated() == alone
    assert contents(b) == [1, 2, 9]
    b.close()
    assert tier.n_bytes == allocated() == 0


@pytest.mark.parametrize("writable", [False, True])
def test_a_file_may_be_written_only_where_a_device_has_to_lock_it(writable: bool) -> None:
    tier = HostTier()
    tier.make_writable(writable)
    a = load(tier, "a", one=1)
    (fd,) = a.files()
    try:
        assert bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE) is not writable
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
    finally:
        a.close()


def test_progress_is_told_for_each_piece() -> None:
    result: list[int] = []
    held = load(HostTier(lambda: result.append(1)), "a", embed=1, one=2)
    assert len(result) >= 2
    held.close()


def test_a_segment_that_a_model_has_twice_is_there_once() -> None:
    tier = HostTier()
    a = load(tier, "a", one=4, two=4)
    assert len(set(a.addresses())) == 1
    a.close()
    assert allocated() == 0


def test_the_layout_counts_not_only_the_bytes() -> None:
    tier = HostTier()
    a = load(tier, "a", one=0)
    (wide,) = segments("one")
    other = pack("one", [tensor("one.w", ROWS // 2, 2), tensor("one.b", 1000)])
    assert other.n_bytes == wide.n_bytes
    b = HostBytes("b", [other], Filler({"one": 0}), 1, tier)
    assert b.digests != a.digests
    a.close()
    b.close()


def test_a_duplicate_is_in_memory_twice_by_no_more_than_a_segment() -> None:
    tier = HostTier()
    names = {f"layer{i}": i for i in range(20)}
    a = load(tier, "a", **names)
    filler = Filler(names)
    b = HostBytes("b", segments(*names), filler, 2, tier)
    assert 20 * 24576 < filler.peak <= 21 * 24576
    assert tier.n_bytes == allocated() == 20 * 24576
    a.close()
    b.close()


def test_a_load_that_fails_leaves_what_others_hold() -> None:
    tier = HostTier()
    a = load(tier, "a", one=1, two=2)

    def broken(piece: Piece) -> bytes:
        if piece.tensor.names[0] == "three.w":
            raise ValueError("no such row")
        return Filler({"one": 1, "two": 8})(piece)

    with pytest.raises(ValueError, match="no such row"):
        HostBytes("b", segments("one", "two", "three"), broken, 2, tier)
    assert tier.n_bytes == allocated() == 2 * 24576
    assert contents(a) == [1, 2]
    a.close()
    with pytest.raises(DeviceError, match="closed"):
        a.addresses()


def test_files_of_a_segment_are_the_same_memory() -> None:
    tier = HostTier()
    a, b = load(tier, "a", one=7), load(tier, "b", one=7)
    assert a.files() == b.files()
    assert Path(f"/proc/self/fd/{a.files()[0]}").read_bytes()[:3] == b"\x07\x07\x07"
    a.close()
    b.close()
