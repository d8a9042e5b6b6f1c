"""Two processes lend to each other, over the messages and the socket of `transport.lending`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

from ballast.core.errors import DeviceError
from ballast.core.lease import Lease
from ballast.core.units import KiB
from ballast.memory.lend import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.lending import (
    AskedBack,
    Lent,
    PagesSocket,
    Returned,
    decode,
    encode,
    fetch_pages,
)
from ballast.transport.messages import MalformedMessage
from ballast.transport.zmq import PrivateDirectory

PAGE = 64 * KiB
LEASE = Lease(3, 1, "cpu:0", "cpu:1", (5, 7))

_BORROWER = """
import sys
from multiprocessing.connection import Connection
from multiprocessing import Pipe
from pathlib import Path
from ballast.memory.borrow import Borrower
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.lending import AskedBack, Returned, decode, encode, fetch_pages

pipe = Connection(int(sys.argv[1]))
size = int(sys.argv[3])
vm = MemfdVm(size, 4)
pool = Pool(vm, 4)
borrower = Borrower(pool, vm, "cpu:1")
borrower.meet("cpu:0", 1, fetch_pages(Path(sys.argv[2])))
kv = BackedRange(pool, vm, "kv", 8 * size)
assert kv.back(0, 1) is None
while True:
    message = decode(pipe.recv_bytes())
    if isinstance(message, AskedBack):
        for place in borrower.recall(message.lease):
            borrower.release(kv, place.at, 1)
        for part in borrower.settle():
            pipe.send_bytes(encode(Returned(part)))
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
    directory = PrivateDirectory()
    pages = PagesSocket(directory.path)
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _BORROWER, str(theirs.fileno())]
    child = subprocess.Popen([*command, str(directory.path), str(PAGE)], pass_fds=[theirs.fileno()])
    theirs.close()
    while not pages.serve(vm.export(())):
        assert child.poll() is None
    lender.meet("cpu:1", 1)
    for _ in range(2):
        lease = lender.lend("cpu:1", 3)
        assert isinstance(lease, Lease)
        ours.send_bytes(encode(Lent(lease)))
        assert ours.recv_bytes() == b"used"
        fd = vm.export(()).fd
        assert fd is not None
        for page in lease.pages:
            assert os.pread(fd, PAGE, page * PAGE) == bytes([42]) * PAGE
    asked = lender.recall(lease.part(lease.pages[:2]), due=1.0)
    assert asked is not None
    ours.send_bytes(encode(AskedBack(asked)))
    told = decode(ours.recv_bytes())
    assert isinstance(told, Returned)
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
    directory.close()
    vm.close()


@pytest.mark.parametrize("message", [Lent(LEASE), AskedBack(LEASE), Returned(LEASE)])
def test_messages_arrive_as_they_were(message: Lent | AskedBack | Returned) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x81\xa4type\xa4Lent"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


def test_nobody_asks_and_nobody_serves(tmp_path: Path) -> None:
    vm = MemfdVm(PAGE, 2)
    with pytest.raises(DeviceError, match="connect"):
        fetch_pages(tmp_path)
    pages = PagesSocket(tmp_path)
    assert pages.serve(vm.export(())) == 0
    with pytest.raises(DeviceError, match="bind"):
        PagesSocket(tmp_path)
    hasty = socket.socket(socket.AF_UNIX)
    hasty.connect(str(tmp_path / "pages.sock"))
    hasty.close()
    pages.serve(vm.export(()))
    pages.close()
    vm.close()
