"""Weights that several workers hold are in memory once, and no longer than any of them lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ballast.cluster.segment_broker import SegmentBroker, SegmentClient
from ballast.core.errors import DeviceError
from ballast.memory import syscalls as sys
from ballast.memory.cuda.calls import Attribute
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.weights.host import HostTier
from tests.memory.fake_cuda import FakeDriver
from tests.weights.test_host import (  # noqa: F401
    Filler,
    allocated,
    contents,
    load,
    only_its_own,
    segments,
)


@contextlib.contextmanager
def tier(broker: SegmentBroker) -> Iterator[tuple[HostTier, socket.socket]]:
    """A worker's, and the broker's end of its connection."""
    ours, theirs = broker.open()
    client = SegmentClient(os.dup(theirs.fileno()))
    theirs.close()
    try:
        yield HostTier(exchange=client), ours
    finally:
        client.close()
        broker.close(ours)


def test_equal_segments_are_there_once_in_whichever_process() -> None:
    async def scenario() -> None:
        broker = SegmentBroker()
        with tier(broker) as (first, one), tier(broker) as (second, two):
            a = await asyncio.to_thread(load, first, "a", embed=1, one=2)
            b = await asyncio.to_thread(load, second, "b", tokens=1, eins=3)
            inodes = [[os.fstat(fd).st_ino for fd in held.files()] for held in (a, b)]
            assert inodes[0][0] == inodes[1][0]
            assert inodes[0][1] != inodes[1][1]
            assert not any(os.get_inheritable(fd) for held in (a, b) for fd in held.files())
            assert (contents(a), contents(b), a.digests[0]) == ([1, 2], [1, 3], b.digests[0])
            assert len(broker) == 3
            await asyncio.to_thread(a.close)
            while len(broker) > 2:
                await asyncio.sleep(0)
            again = await asyncio.to_thread(load, first, "a", embed=1)
            assert os.fstat(again.files()[0]).st_ino == inodes[1][0]
            broker.close(two)  # as where its process has died
            assert len(broker) == 1
            broker.close(one)
            assert len(broker) == 0
            broker.close(one)
            assert (contents(again), contents(b)) == ([1], [1, 3])
            again.close()
            b.close()
        assert allocated() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("reads_only", [0, 1])
def test_a_gpu_page_locks_what_a_cpus_worker_has_filled(reads_only: int) -> None:
    """Whether the GPU can page-lock memory that is sealed against writing, or not."""
    driver = FakeDriver(attributes={Attribute.PINS_READ_ONLY: reads_only})
    pins = PinnedMemory(driver, 0)

    async def scenario() -> None:
        broker = SegmentBroker(writable=True)
        with tier(broker) as (cpu, _), tier(broker) as (gpu, _):
            filled = await asyncio.to_thread(load, cpu, "a", embed=1)
            mapped = await asyncio.to_thread(load, gpu, "b", embed=1)
            assert os.fstat(filled.files()[0]).st_ino == os.fstat(mapped.files()[0]).st_ino
            (address,) = mapped.addresses()
            assert pins.pin(address, sys.PAGESIZE), "not page-locked"
            pins.unpin(address)
            with pytest.raises(OSError):
                os.ftruncate(filled.files()[0], 0)
            filled.close()
            mapped.close()

    asyncio.run(scenario())
    pins.close()
    assert driver.is_clean()


def test_without_gpus_segments_are_sealed_against_writing() -> None:
    async def scenario() -> None:
        broker = SegmentBroker()
        with tier(broker) as (one, _):
            held = await asyncio.to_thread(load, one, "a", embed=1)
            with pytest.raises(PermissionError):
                os.pwrite(held.files()[0], b"x", 0)
            held.close()

    asyncio.run(scenario())


def test_a_worker_whose_end_is_closed_holds_nothing() -> None:
    async def scenario() -> None:
        broker = SegmentBroker()
        with tier(broker) as (alone, _):
            held = await asyncio.to_thread(load, alone, "a", embed=1)
            assert len(broker) == 1
        assert len(broker) == 0
        later = await asyncio.to_thread(load, alone, "b", embed=2)  # nobody is there to ask
        assert (contents(held), contents(later)) == ([1], [2])
        held.close()
        later.close()

    asyncio.run(scenario())


class Liar:
    """Offers a file that is not sealed."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.finds = self.writable = False

    def find(self, origin: str) -> tuple[str, int] | None:
        return ("d", os.memfd_create("ballast-liar")) if self.finds else None

    def share(self, digest: str, fd: int, origin: str | None) -> int | None:
        other = os.memfd_create("ballast-liar")
        os.ftruncate(other, os.fstat(fd).st_size)
        return other

    def release(self, digest: str) -> None:
        self.released.append(digest)


def test_what_is_not_sealed_is_not_taken() -> None:
    liar = Liar()
    unsafe = HostTier(exchange=liar)
    with pytest.raises(DeviceError, match="another process's segment"):
        load(unsafe, "a", embed=1)
    assert (len(liar.released), unsafe.n_bytes, allocated()) == (1, 0, 0)
    (segment,) = segments("embed")
    liar.finds = True
    with pytest.raises(DeviceError, match="another process's segment"):
        unsafe.hold("a", segment, Filler({"embed": 1}), 1, lambda segment: "o")
    assert (liar.released[1:], unsafe.n_bytes, allocated()) == (["d"], 0, 0)
