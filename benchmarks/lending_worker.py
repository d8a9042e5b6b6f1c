"""One of the two worker processes of `benchmarks.lending`: a device that lends and borrows.

It does what it is told over a pipe, one command at a time, and answers with what came of it. Every
page that it writes gets a stamp of its own, in each of its 4 KiB; `check` compares all that there
is: ledger, leases, what Linux shows as mapped, the stamps of all pages mapped here, and the stamps
of all pages of this device, wherever they are mapped, read from its memfd.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BallastError
from ballast.core.lease import AskedBack, Lease, Lent, Returned
from ballast.memory.borrow import Borrower
from ballast.memory.lend import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.tensor import array_at
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.lending import PagesSocket, fetch_pages
from ballast.transport.messages import OfLease, decode_to_worker
from ballast.transport.messages import encode as encode_message

STRIDE = 4096
SPAN = 16
"""Indices of the range by pages of the device: holes never fill it."""


class Worker:
    """`commands` are the methods that do not begin with an underscore."""

    def __init__(self, name: str, page_bytes: int, n_pages: int) -> None:
        self._vm = MemfdVm(page_bytes, n_pages)
        self._pool = Pool(self._vm, n_pages)
        self._condemned: list[tuple[str, int]] = []
        self._lender = Lender(self._pool, name, lambda *told: self._condemned.append(told))
        self._borrower = Borrower(self._pool, self._vm, name)
        span = SPAN * n_pages * page_bytes
        self._range = BackedRange(self._pool, self._vm, f"kv:{name}", span)
        self._socket = PagesSocket()
        self._stamps: dict[int, int] = {}
        """Index -> what its page is filled with."""
        self._first = 0
        """The number of the peer's page 0 here."""
        self._deaf = False
        self._pool.populate_some(n_pages)

    def serve(self) -> int:
        """Give the device to the peer that asks, or is about to."""
        deadline = time.monotonic() + 5.0
        while not (served := self._socket.serve(self._vm.export(()))):
            if time.monotonic() > deadline:
                raise TimeoutError("nobody asked for the device")
            time.sleep(1e-4)
        return served

    def address(self) -> str:
        return self._socket.address

    def meet(self, peer: str, epoch: int, address: str) -> None:
        exported = fetch_pages(address)
        assert exported.fd is not None
        self._first = self._vm.attach(replace(exported, fd=os.dup(exported.fd)))
        self._borrower.meet(peer, epoch, exported)
        self._lender.meet(peer, epoch)

    def lend(self, peer: str, n: int) -> bytes | None:
        """The message to the borrower; None where pages are short."""
        lease = self._lender.lend(peer, n)
        return None if isinstance(lease, Short) else encode(Lent(lease))

    def recall(self, peer: str, which: int, skip: int, n: int, due: float) -> bytes | None:
        """Ask for `n` pages of a lease from the `skip`-th on; None where none is out."""
        leases = self._lender.leases(peer)
        if not leases:
            return None
        lease = leases[which % len(leases)]
        skip %= len(lease.pages)
        part = self._lender.recall(lease.part(lease.pages[skip : skip + n]), due)
        return None if part is None else encode(AskedBack(part))

    def hear(self, data: bytes) -> dict[str, Any]:
        """What a message from the peer led to: answers, or why it was refused."""
        message = decode(data)
        if isinstance(message, Lent):
            return {"refused": self._borrower.accept(message.lease), "answers": []}
        if isinstance(message, Returned):
            return {"refused": self._lender.returned(message.lease), "answers": []}
        if self._deaf:
            return {"refused": None, "answers": []}
        for place in self._borrower.recall(message.lease):
            self._drop(place.at, 1)
        return {"refused": None, "answers": self.settle()}

    def settle(self) -> list[bytes]:
        return [encode(Returned(part)) for part in self._borrower.settle()]

    def offer_back(self, peer: str, n: int) -> list[bytes]:
        self._borrower.offer_back(peer, n)
        return self.settle()

    def use(self, n: int, stamp: int) -> list[tuple[int, int]]:
        """Map `n` borrowed pages and write on them: (the peer's page, its stamp) each."""
        at = self._gap(n)
        if self._borrower.back(self._range, at, n) is not None:
            return []
        return [(self._write(at + i, stamp + i) - self._first, stamp + i) for i in range(n)]

    def unuse(self, n: int) -> None:
        """Unmap up to `n` borrowed pages, for other uses."""
        for at in [at for at in self._stamps if self._is_borrowed(at)][:n]:
            self._drop(at, 1)

    def own(self, n: int, stamp: int) -> list[tuple[int, int]]:
        """The same with `n` of its own pages."""
        at = self._gap(n)
        if self._range.back(at, n) is not None:
            return []
        return [(self._write(at + i, stamp + i), stamp + i) for i in range(n)]

    def disown(self, n: int) -> list[int]:
        """Free up to `n` of its own pages: which."""
        mine = [at for at in self._stamps if not self._is_borrowed(at)][:n]
        pages = [self._range.pages(at, 1)[0] for at in mine]
        for at in mine:
            self._range.release(at, 1)
            del self._stamps[at]
        return pages

    def go_deaf(self) -> None:
        """From now on answer no recall, and keep writing on what was borrowed, until killed."""
        self._deaf = True
        views = [
            (array_at(self._range.address(at), (self._vm.page_bytes // 8,), np.int64), stamp)
            for at, stamp in self._stamps.items()
            if self._is_borrowed(at)
        ]

        def scribble() -> None:
            while True:
                for view, stamp in views:
                    view[:: STRIDE // 8] = stamp

        threading.Thread(target=scribble, daemon=True).start()

    def overdue(self, now: float) -> list[tuple[str, int]]:
        """Whom the lender wants killed."""
        self._lender.check(now)
        told, self._condemned = self._condemned, []
        return told

    def gone(self, peer: str, epoch: int) -> int:
        """The peer's process has ended: pages it had, and wrong stamps on those it had lent."""
        freed = self._lender.gone(peer, epoch)
        for place in self._borrower.gone(peer, epoch):
            if not self._right(place.at):
                raise AssertionError(f"index {place.at}: a dead lender's page changed")
            self._drop(place.at, 1)
        assert self._borrower.settle() == []
        return freed

    def check(self, expected: Sequence[tuple[int, int]]) -> dict[str, int]:
        """`expected`: page and stamp of every page of this device that anyone uses."""
        for book in (self._pool, self._lender, self._borrower, self._range):
            book.validate()
        shown = self._vm.os_pages(self._range.range)
        told = {at: self._range.pages(at, 1)[0] for at in self._stamps}
        lent = sum(self._pool.owner_of(page) == OWNER for page in shown.values())
        wrong = sum(not self._right(at) for at in self._stamps)
        wrong += sum(not self._filled(page, stamp) for page, stamp in expected)
        budget = self._pool.total * self._vm.page_bytes
        return {
            "corrupted": wrong,
            "disagreements": (shown != told) + lent + (self._vm.physical_bytes() > budget),
            "strangers": len(self._memories()) - 2,
            "free": self._pool.free,
            "lent": self._pool.owned(OWNER),
            "borrowed": self._pool.borrowed(),
            "unused": self._borrower.unused,
            "own": self._pool.owned(self._range.owner),
        }

    def cost(self, peer: str, call: str, data: bytes, n: int) -> tuple[float, bytes]:
        """Seconds of one step, all of `n` pages at once, and the message that it led to."""
        message = decode(data) if data else None
        answer: Lent | AskedBack | Returned | None = None
        start = time.perf_counter()
        if call == "lend":
            lease = self._lender.lend(peer, n)
            assert isinstance(lease, Lease)
            answer = Lent(lease)
        elif call == "accept":
            assert message is not None
            assert self._borrower.accept(message.lease) is None
        elif call == "map":
            assert self._borrower.back(self._range, 0, n) is None
        elif call == "touch":
            array_at(self._range.address(0), (n * self._vm.page_bytes // 8,), np.int64)[:] = 1
        elif call == "ask_back":
            (lease,) = self._lender.leases(peer)
            part = self._lender.recall(lease, 1e9)
            assert part is not None
            answer = AskedBack(part)
        elif call == "unmap":
            assert message is not None
            assert len(self._borrower.recall(message.lease)) == n
            self._borrower.release(self._range, 0, n)
            (answer,) = map(Returned, self._borrower.settle())
        elif call == "take_back":
            assert message is not None
            assert self._lender.returned(message.lease) is None
        seconds = time.perf_counter() - start
        return seconds, encode(answer) if answer else b""

    def _gap(self, n: int) -> int:
        """The first of `n` empty indices."""
        at = 0
        for taken in sorted(self._stamps):
            if taken - at >= n:
                break
            at = taken + 1
        return at

    def _write(self, at: int, stamp: int) -> int:
        array_at(self._range.address(at), (self._vm.page_bytes // 8,), np.int64)[:] = stamp
        self._stamps[at] = stamp
        return self._range.pages(at, 1)[0]

    def _drop(self, at: int, n: int) -> None:
        self._borrower.release(self._range, at, n)
        for i in range(at, at + n):
            del self._stamps[i]

    def _is_borrowed(self, at: int) -> bool:
        return self._range.pages(at, 1)[0] >= self._vm.n_pages

    def _right(self, at: int) -> bool:
        view = array_at(self._range.address(at), (self._vm.page_bytes // 8,), np.int64)
        return bool((view[:: STRIDE // 8] == self._stamps[at]).all())

    def _filled(self, page: int, stamp: int) -> bool:
        fd = self._vm.export(()).fd
        assert fd is not None
        data = os.pread(fd, self._vm.page_bytes, page * self._vm.page_bytes)
        return bool((np.frombuffer(data, np.int64)[:: STRIDE // 8] == stamp).all())

    def _memories(self) -> set[str]:
        """Inodes of the devices that this process has open or mapped; its own and the peer's."""
        with open("/proc/self/maps") as file:
            found = set(re.findall(r" (\d+) +/memfd:ballast ", file.read()))
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:ballast"):
                    found.add(str(os.stat(int(fd)).st_ino))
            except OSError:
                continue
        return found


def encode(word: Lent | AskedBack | Returned) -> bytes:
    return encode_message(OfLease.of(word))


def decode(data: bytes) -> Lent | AskedBack | Returned:
    message = decode_to_worker(data)
    assert isinstance(message, OfLease)
    return message.word


def serve(connection: Connection, name: str, page: int, n_pages: int) -> None:
    """The process: until the pipe is closed."""
    worker = Worker(name, page, n_pages)
    while True:
        try:
            command, *arguments = msgspec.msgpack.decode(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer: Any = [True, getattr(worker, command)(*arguments)]
        except (BallastError, AssertionError, OSError) as error:
            answer = [False, f"{name}: {command}: {type(error).__name__}: {error}"]
        connection.send_bytes(msgspec.msgpack.encode(answer))
