"""Two processes, one memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from ballast.core.errors import DeviceError
from ballast.core.units import KiB
from ballast.memory.share import receive_pages, send_pages
from ballast.memory.tensor import array_at
from ballast.memory.vm import Exported
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm
from tests.descriptors import open_descriptors

PAGE = 64 * KiB

_CHILD = """
import socket, sys
from ballast.memory.share import receive_pages
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm

connection = socket.socket(fileno=int(sys.argv[1]))
first = receive_pages(connection)
vm = MemfdVm(first.page_bytes, 1)
start = vm.attach(first)
r = vm.reserve(8 * vm.page_bytes)
vm.map(r, 1, [0, *(start + page for page in first.pages)])
seen = array_at(r.address(2), (len(first.pages), vm.page_bytes), "uint8")
connection.sendall(bytes(seen[:, 0]))
seen[:, 1] = [41, 42, 43]
connection.recv(1)
connection.sendall(bytes(seen[:, 2]))
second = receive_pages(connection)
assert vm.attach(second) == start
vm.map(r, 0, [start + page for page in second.pages])
array_at(r.base, (vm.page_bytes,), "uint8")[:] = 77
vm.close()
connection.sendall(b"k")
"""


def test_two_processes_see_each_others_writes(memfd: MemfdVm) -> None:
    r = memfd.reserve(8 * PAGE)
    memfd.map(r, 0, [5, 9, 10, 20])
    mine = array_at(r.base, (4, PAGE), "uint8")
    mine[:3, 0] = [1, 2, 3]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    ours.settimeout(240)
    send_pages(ours, memfd.export([5, 9, 10]))
    assert ours.recv(3) == bytes([1, 2, 3])
    mine[:3, 2] = [7, 8, 9]
    ours.sendall(b"g")
    assert ours.recv(3) == bytes([7, 8, 9])
    assert mine[:3, 1].tolist() == [41, 42, 43]
    send_pages(ours, memfd.export([20]))
    assert ours.recv(1) == b"k"
    assert (mine[3] == 77).all()
    assert child.wait(240) == 0
    ours.close()


def test_a_device_is_imported_once(memfd: MemfdVm) -> None:
    a, b = socket.socketpair()
    vm = MemfdVm(PAGE, 3)
    open_before = len(open_descriptors())
    for pages in ([1, 2], [3]):
        send_pages(a, memfd.export(pages))
    first, second = receive_pages(b), receive_pages(b)
    assert (first.pages, second.pages) == ((1, 2), (3,))
    start = vm.attach(first)
    assert vm.attach(second) == start
    assert len(open_descriptors()) == open_before + 1
    vm.detach(start)
    assert len(open_descriptors()) == open_before
    vm.close()
    a.close()
    b.close()


def test_what_cannot_be_shared() -> None:
    a, b = socket.socketpair()
    null = NullVm(PAGE, 4).export([1])
    with pytest.raises(DeviceError, match="without memory"):
        send_pages(a, null)
    with pytest.raises(DeviceError):
        MemfdVm(PAGE, 4).attach(null)
    a.sendall(b"\0\0\0\2{}")
    with pytest.raises(DeviceError, match="not a description"):
        receive_pages(b)
    b.close()
    a.close()


def test_half_a_message(memfd: MemfdVm) -> None:
    a, b = socket.socketpair()
    open_before = len(open_descriptors())
    socket.send_fds(a, [b"\0\0\0\x09{"], [memfd.export([0]).fd or -1])
    a.close()
    with pytest.raises(DeviceError, match="ended early"):
        receive_pages(b)
    b.close()
    assert len(open_descriptors()) == open_before - 2


def test_a_file_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * PAGE)
    stat = os.fstat(fd)
    device = (stat.st_dev, stat.st_ino)
    vm = MemfdVm(PAGE, 1)
    with pytest.raises(DeviceError, match="not sealed"):
        vm.attach(Exported(device, PAGE, 4, (0,), fd))
    with pytest.raises(DeviceError, match="not what was said"):
        vm.attach(Exported(device, PAGE, 5, (0,), fd))
    with pytest.raises(DeviceError, match="not what was said"):
        vm.attach(Exported((0, 0), PAGE, 4, (0,), fd))
    vm.close()
    os.close(fd)


def test_pages_that_were_received_and_are_not_attached_leave_no_descriptor(memfd: MemfdVm) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        send_pages(ours, memfd.export([1]))
        received = receive_pages(theirs)
    assert received.fd is not None
    os.fstat(received.fd)
    received.discard()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(received.fd)
    NullVm(PAGE, 4).export([1]).discard()
