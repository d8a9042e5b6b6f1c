"""Two processes lend to each other, over the messages and the socket of `transport.lending`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing import Pipe

import pytest

from ballast.core.errors import DeviceError
from ballast.core.lease import AskedBack, Lease, Lent, Returned
from ballast.core.units import KiB
from ballast.memory.lend import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.lending import PagesSocket, fetch_pages
from ballast.transport.messages import OfLease, decode_to_server, decode_to_worker, encode

PAGE = 64 * KiB
LEASE = Lease(3, 1, "cpu:0", "cpu:1", (5, 7))

_BORROWER = """
import sys
from multiprocessing.connection import Connection
from multiprocessing import Pipe
from ballast.core.lease import AskedBack, Returned
from ballast.memory.borrow import Borrower
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.lending import fetch_pages
from ballast.transport.messages import OfLease, decode_to_worker, encode

pipe = Connection(int(sys.argv[1]))
size = int(sys.argv[3])
vm = MemfdVm(size, 4)
pool = Pool(vm, 4)
borrower = Borrower(pool, vm, "cpu:1")
borrower.meet("cpu:0", 1, fetch_pages(sys.argv[2]))
kv = BackedRange(pool, vm, "kv", 8 * size)
assert kv.back(0, 1) is None
while True:
    message = decode_to_worker(pipe.recv_bytes()).word
    if isinstance(message, AskedBack):
        for place in borrower.recall(message.lease):
            borrower.release(kv, place.at, 1)
        for part in borrower.settle():
            pipe.send_bytes(encode(OfLease.of(Returned(part))))
    else:
        n = len(message.lease.pages)
        assert borrower.accept(message.lease) is None
        assert borrower.back(kv, 1 + kv.aliased, n) is None
        array_at(kv.address(0), ((1 + kv.aliased) * size,), "uint8")[:] = 42
        borrower.validate()
        assert kv.os_backed() == 1 + kv.aliased
        pipe.send_bytes(b"used")
"""


def test_lend_recall_and_kill() -> None:
    vm = MemfdVm(PAGE, 8)
    pool = Pool(vm, 8)
    killed: list[tuple[str, int]] = []
    lender = Lender(pool, "cpu:0", lambda *told: killed.append(told))
    own = BackedRange(pool, vm, "kv", 8 * PAGE)
    assert own.back(0, 2) is None
    array_at(own.base, (2 * PAGE,), "uint8")[:] = 7
    pages = PagesSocket()
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _BORROWER, str(theirs.fileno())]
    child = subprocess.Popen([*command, pages.address, str(PAGE)], pass_fds=[theirs.fileno()])
    theirs.close()
    while not pages.serve(vm.export(())):
        assert child.poll() is None
    lender.meet("cpu:1", 1)
    for _ in range(2):
        lease = lender.lend("cpu:1", 3)
        assert isinstance(lease, Lease)
        ours.send_bytes(encode(OfLease.of(Lent(lease))))
        assert ours.recv_bytes() == b"used"
        fd = vm.export(()).fd
        assert fd is not None
        for page in lease.pages:
            assert os.pread(fd, PAGE, page * PAGE) == bytes([42]) * PAGE
    asked = lender.recall(lease.part(lease.pages[:2]), due=1.0)
    assert asked is not None
    ours.send_bytes(encode(OfLease.of(AskedBack(asked))))
    told = decode_to_server(ours.recv_bytes())
    assert isinstance(told, OfLease)
    assert isinstance(told.word, Returned)
    assert lender.returned(told.lease) is None
    assert (pool.free, pool.lent(OWNER)) == (2, {"cpu:1": 4})
    lender.recall(lease, due=2.0)
    lender.check(3.0)
    assert killed == [("cpu:1", 1)]
    child.kill()
    child.wait()
    assert lender.gone("cpu:1", 1) == 4
    assert own.back(2, 6) is None
    array_at(own.address(2), (6 * PAGE,), "uint8")[:] = 9
    assert (array_at(own.base, (2 * PAGE,), "uint8") == 7).all()
    pool.validate()
    lender.validate()
    ours.close()
    pages.close()
    vm.close()


@pytest.mark.parametrize("word", [Lent(LEASE), AskedBack(LEASE), Returned(LEASE)])
def test_words_arrive_as_they_were(word: Lent | AskedBack | Returned) -> None:
    data = encode(OfLease.of(word))
    for decode in (decode_to_worker, decode_to_server):
        message = decode(data)
        assert isinstance(message, OfLease)
        assert message.word == word


def test_nobody_asks_and_nobody_serves() -> None:
    vm = MemfdVm(PAGE, 2)
    with pytest.raises(DeviceError, match="connect"):
        fetch_pages("nobody")
    pages = PagesSocket()
    assert pages.serve(vm.export(())) == 0
    hasty = socket.socket(socket.AF_UNIX)
    hasty.connect(f"\0{pages.address}")
    hasty.close()
    pages.serve(vm.export(()))
    pages.close()
    vm.close()
