"""Two processes lend pages to each other, through `transport.page_descriptors`: CPUs, and GPUs over
the stand-in of the driver, each process with one of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest

from ballast.core.errors import DeviceError
from ballast.core.lease import Lease, PagesLentEvent, PagesRecalledEvent, PagesReturnedEvent
from ballast.core.units import KiB
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.lending.lender import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm import Exported, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport import page_descriptors
from ballast.transport.page_descriptors import (
    PAGES_AT_ONCE,
    PagesSocket,
    fetch_lease,
    fetch_pages,
    serve_pages,
)
from ballast.transport.worker_messages.codec import decode_to_server, decode_to_worker, encode
from ballast.transport.worker_messages.lending_messages import LeaseMsg
from tests.descriptors import open_descriptors
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 * KiB
LEASE = Lease(3, 1, "cpu:0", "cpu:1", (5, 7))

_BORROWER = """
import ctypes
import sys
from multiprocessing.connection import Connection
from multiprocessing import Pipe
from ballast.core.lease import PagesRecalledEvent, PagesReturnedEvent
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport import page_descriptors
from ballast.transport.page_descriptors import fetch_lease, fetch_pages
from ballast.transport.worker_messages.codec import decode_to_worker, encode
from ballast.transport.worker_messages.lending_messages import LeaseMsg
from tests.memory.fake_cuda import FakeDriver

page_descriptors.PATIENCE_SECONDS = 240.0
pipe = Connection(int(sys.argv[1]))
size = int(sys.argv[3])
gpu = sys.argv[4] == "gpu"
vm = CudaVm(FakeDriver(devices=2), 1, size, 4) if gpu else MemfdVm(size, 4)
pool = Pool(vm, 4)
borrower = Borrower(pool, vm, "cpu:1")
borrower.meet("cpu:0", 1, fetch_pages(sys.argv[2]))
pages = list(pool.allocate("kv", 1))
while True:
    message = decode_to_worker(pipe.recv_bytes()).event
    if isinstance(message, PagesRecalledEvent):
        for used in borrower.recall(message.lease):
            borrower.release(used.holder, [used.page])
            pages.remove(used.page)
        for part in borrower.settle():
            pipe.send_bytes(encode(LeaseMsg.of(PagesReturnedEvent(part))))
    else:
        n = len(message.lease.pages)
        opened = []
        if gpu:
            fetch_lease(sys.argv[2], message.lease, lambda pages: opened.append(vm.open(pages)))
        assert borrower.accept(message.lease, opened) is None
        pages += borrower.take("kv", n)
        for page in pages:
            ctypes.memset(vm.window.address(page), 42, size)
        borrower.validate()
        shown = vm.os_pages(vm.window)
        assert all(shown[page] == page for page in pages)
        pipe.send_bytes(b"used")
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_descriptors, "PATIENCE_SECONDS", 240.0)


@contextmanager
def serving(vm: Vm, offered: dict[tuple[str, int, int], tuple[int, ...]]) -> Iterator[str]:
    """Whoever asks, on a thread; where."""
    pages, ended = PagesSocket(), threading.Event()

    def give() -> None:
        while not ended.wait(0.001):
            for connection in pages.accept():
                serve_pages(connection, vm.export, lambda *key: offered.get(key, ()))

    thread = threading.Thread(target=give)
    thread.start()
    try:
        yield pages.address
    finally:
        ended.set()
        thread.join()
        pages.close()


def contents(vm: Vm, page: int) -> bytes:
    """Of a page, whoever maps it."""
    if isinstance(vm, MemfdVm):
        fd = vm.export(()).fd
        assert fd is not None
        return os.pread(fd, PAGE, page * PAGE)
    exported = vm.export([page])
    assert exported.page_fds is not None
    found = os.pread(exported.page_fds[0], PAGE, 0)
    exported.close()
    return found


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_lend_recall_and_kill(kind: str) -> None:
    driver = FakeDriver(devices=2)
    vm = MemfdVm(PAGE, 80) if kind == "cpu" else CudaVm(driver, 0, PAGE, 80)
    pool = Pool(vm, 80)
    killed: list[tuple[str, int]] = []
    lender = Lender(pool, "cpu:0", lambda *result: killed.append(result))
    pool.free_pages.populate_some(80)
    own = BackedRange(pool, vm, "kv", 80 * PAGE)
    assert own.back(0, 2) is None
    array_at(own.range.base, (2 * PAGE,), "uint8")[:] = 7
    fds = len(open_descriptors())
    offered: dict[tuple[str, int, int], tuple[int, ...]] = {}
    with serving(vm, offered) as address:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", _BORROWER, str(theirs.fileno()), address, str(PAGE), kind]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        lender.meet("cpu:1", 1)
        for _ in range(2):
            driver.exclusive = True
            lease = lender.lend("cpu:1", 3 + PAGES_AT_ONCE)
            assert isinstance(lease, Lease)
            offered["cpu:1", 1, lease.id] = lease.pages
            ours.send_bytes(encode(LeaseMsg.of(PagesLentEvent(lease))))
            assert ours.recv_bytes() == b"used"
            driver.exclusive = False
            assert {contents(vm, page) for page in lease.pages} == {bytes([42]) * PAGE}
        driver.exclusive = True
        asked = lender.recall(lease.part(lease.pages[:2]), due=1.0)
        assert asked is not None
        ours.send_bytes(encode(LeaseMsg.of(PagesRecalledEvent(asked))))
        result = decode_to_server(ours.recv_bytes())
        assert isinstance(result, LeaseMsg)
        assert isinstance(result.event, PagesReturnedEvent)
        assert lender.returned(result.lease) is None
        assert (pool.free, pool.ledger.held_of(OWNER)) == (10, {"cpu:1": 68})
        lender.recall(lease, due=2.0)
        lender.check(3.0)
        assert killed == [("cpu:1", 1)]
        child.kill()
        child.wait()
        assert lender.gone("cpu:1", 1) == 68
        # None of it is anybody else's any more: the driver looks.
        assert own.back(2, 78) is None
        array_at(own.range.address(2), (78 * PAGE,), "uint8")[:] = 9
        assert (array_at(own.range.base, (2 * PAGE,), "uint8") == 7).all()
        pool.validate()
        lender.validate()
        ours.close()
    assert len(open_descriptors()) == fds
    vm.close()


def test_a_lease_that_is_over_is_not_given() -> None:
    vm = CudaVm(FakeDriver(), 0, PAGE, 2)
    vm.populate([0])
    with serving(vm, {("b", 1, 4): (0,), ("b", 1, 5): (0, 1)}) as address:
        exported = fetch_pages(address)
        assert (exported.pages, exported.page_fds, exported.n_pages) == ((), (), 2)
        for lease in (Lease(3, 1, "a", "b", (0,)), Lease(5, 1, "a", "b", (0, 1))):
            with pytest.raises(DeviceError, match="recvmsg"):
                fetch_lease(address, lease, Exported.close)
        with pytest.raises(DeviceError, match="not the pages of lease 4"):
            fetch_lease(address, Lease(4, 1, "a", "b", (1,)), Exported.close)
        fetch_lease(address, Lease(4, 1, "a", "b", (0,)), Exported.close)
    vm.close()


@pytest.mark.parametrize(
    "word", [PagesLentEvent(LEASE), PagesRecalledEvent(LEASE), PagesReturnedEvent(LEASE)]
)
def test_words_arrive_as_they_were(
    word: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent,
) -> None:
    data = encode(LeaseMsg.of(word))
    for decode in (decode_to_worker, decode_to_server):
        message = decode(data)
        assert isinstance(message, LeaseMsg)
        assert message.event == word


def test_nobody_asks_and_nobody_serves() -> None:
    with pytest.raises(DeviceError, match="connect"):
        fetch_pages("nobody")
    vm, pages = MemfdVm(PAGE, 2), PagesSocket()
    assert list(pages.accept()) == []
    for result in (b"", b"all of it\n", b'["b", 1]\n'):
        hasty = socket.socket(socket.AF_UNIX)
        hasty.connect(f"\0{pages.address}")
        hasty.sendall(result)
        hasty.close()
        (connection,) = pages.accept()
        assert not serve_pages(connection, vm.export, lambda *_: ())
    pages.close()
    vm.close()
