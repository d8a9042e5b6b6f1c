"""One of the two worker processes of `benchmarks.lending`: a device that lends and borrows.

It does what it is told over a pipe, one command at a time, and answers with what came of it. Every
page that it writes gets a stamp of its own, in each of its 4 KiB; `check` compares all that there
is: ledger, leases, what Linux or the driver shows as mapped, the stamps of all pages mapped here,
and the stamps of all pages of this device, wherever they are mapped: read from its memfd, or, on a
GPU, mapped once more for that.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec
import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BallastError
from ballast.core.lease import Lease, PagesLentEvent, PagesRecalledEvent, PagesReturnedEvent
from ballast.memory.cuda.driver import CudaDriver
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.lending.borrower import Borrower
from ballast.memory.lending.lender import OWNER, Lender
from ballast.memory.pool import Pool
from ballast.memory.tensor import array_at
from ballast.memory.vm import Exported
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.page_descriptors import PagesSocket, fetch_lease, fetch_pages, serve_pages
from ballast.transport.worker_messages.codec import decode_to_worker
from ballast.transport.worker_messages.codec import encode as encode_message
from ballast.transport.worker_messages.lending_messages import LeaseMsg

STRIDE = 4096


class Worker:
    """`commands` are the methods that do not begin with an underscore."""

    def __init__(
        self, name: str, vm: MemfdVm | CudaVm, n_pages: int, torch_device: str | None
    ) -> None:
        """`torch_device`: where a GPU's pages are read and written."""
        self._vm, self._torch = vm, torch_device
        self._pool = Pool(self._vm, n_pages)
        self._condemned: list[tuple[str, int]] = []
        self._lender = Lender(self._pool, name, lambda *result: self._condemned.append(result))
        self._borrower = Borrower(self._pool, self._vm, name)
        self._owner = f"kv:{name}"
        self._beside = vm.reserve(vm.page_bytes)
        self._socket = PagesSocket()
        self._stamps: dict[int, int] = {}
        """Page in use -> what it is filled with."""
        self._first = 0
        """The number of the peer's page 0 here."""
        self._address = ""
        """Where the peer gives its pages."""
        self._taken: tuple[int, ...] = ()
        """What `cost` has taken last."""
        self._leases: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """Lent, by borrower, epoch and lease."""
        self._deaf = False
        self._pool.free_pages.populate_some(n_pages)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Whoever asks for the device."""
        while True:
            select.select([self._socket], [], [])
            for connection in self._socket.accept():
                serve_pages(connection, self._vm.export, lambda *key: self._leases.get(key, ()))

    def address(self) -> str:
        return self._socket.address

    def meet(self, peer: str, epoch: int, address: str) -> None:
        self._address = address
        exported = fetch_pages(address)
        own = exported.fd if exported.fd is None else os.dup(exported.fd)
        self._first = self._vm.attach(replace(exported, fd=own))
        self._borrower.meet(peer, epoch, exported)
        self._lender.meet(peer, epoch)

    def lend(self, peer: str, n: int) -> bytes | None:
        """The message to the borrower; None where pages are short."""
        lease = self._lend(peer, n)
        return None if isinstance(lease, Short) else encode(PagesLentEvent(lease))

    def _lend(self, peer: str, n: int) -> Lease | Short:
        lease = self._lender.lend(peer, n)
        if isinstance(lease, Lease):
            self._leases[peer, lease.epoch, lease.id] = lease.pages
        return lease

    def recall(self, peer: str, which: int, skip: int, n: int, due: float) -> bytes | None:
        """Ask for `n` pages of a lease from the `skip`-th on; None where none is out."""
        leases = self._lender.leases(peer)
        if not leases:
            return None
        lease = leases[which % len(leases)]
        skip %= len(lease.pages)
        part = self._lender.recall(lease.part(lease.pages[skip : skip + n]), due)
        return None if part is None else encode(PagesRecalledEvent(part))

    def hear(self, data: bytes) -> dict[str, Any]:
        """What a message from the peer led to: answers, or why it was refused."""
        message = decode(data)
        if isinstance(message, PagesLentEvent):
            return {"refused": self._accept(message.lease), "answers": []}
        if isinstance(message, PagesReturnedEvent):
            return {"refused": self._lender.returned(message.lease), "answers": []}
        if self._deaf:
            return {"refused": None, "answers": []}
        self._drop([used.page for used in self._borrower.recall(message.lease)])
        return {"refused": None, "answers": self.settle()}

    def _accept(self, lease: Lease) -> str | None:
        opened: list[Exported] = []
        if isinstance(self._vm, CudaVm) and self._borrower.knows(lease.lender, lease.epoch):
            vm = self._vm
            fetch_lease(self._address, lease, lambda pages: opened.append(vm.open(pages)))
        return self._borrower.accept(lease, opened)

    def settle(self) -> list[bytes]:
        return [encode(PagesReturnedEvent(part)) for part in self._borrower.settle()]

    def offer_back(self, peer: str, n: int) -> list[bytes]:
        self._borrower.offer_back(peer, n)
        return self.settle()

    def use(self, n: int, stamp: int) -> list[tuple[int, int]]:
        """Take `n` borrowed pages and write on them: (the peer's page, its stamp) each."""
        pages = self._borrower.take(self._owner, n)
        if isinstance(pages, Short):
            return []
        written = self._write(pages, stamp)
        return [(page - self._first, mark) for page, mark in written]

    def unuse(self, n: int) -> None:
        """Release up to `n` borrowed pages, for other uses."""
        self._drop([page for page in self._stamps if self._is_borrowed(page)][:n])

    def own(self, n: int, stamp: int) -> list[tuple[int, int]]:
        """The same with `n` of its own pages."""
        pages = self._pool.allocate(self._owner, n)
        return [] if isinstance(pages, Short) else self._write(pages, stamp)

    def disown(self, n: int) -> list[int]:
        """Free up to `n` of its own pages: which."""
        pages = [page for page in self._stamps if not self._is_borrowed(page)][:n]
        self._pool.give_back(self._owner, pages)
        for page in pages:
            del self._stamps[page]
        return pages

    def go_deaf(self) -> None:
        """From now on answer no recall, and keep writing on what was borrowed, until killed."""
        self._deaf = True
        views = [
            (self._view(self._vm.window.address(page)), stamp)
            for page, stamp in self._stamps.items()
            if self._is_borrowed(page)
        ]

        def scribble() -> None:
            while True:
                for view, stamp in views:
                    view[:: STRIDE // 8] = stamp
                self._wait()

        threading.Thread(target=scribble, daemon=True).start()

    def overdue(self, now: float) -> list[tuple[str, int]]:
        """Whom the lender wants killed."""
        self._lender.check(now)
        result, self._condemned = self._condemned, []
        return result

    def gone(self, peer: str, epoch: int) -> int:
        """The peer's process has ended: pages it had, and wrong stamps on those it had lent."""
        freed = self._lender.gone(peer, epoch)
        for used in self._borrower.gone(peer, epoch):
            if not self._right(used.page):
                raise AssertionError(f"page {used.page}: a dead lender's page changed")
            self._drop([used.page])
        assert self._borrower.settle() == []
        return freed

    def check(self, expected: Sequence[tuple[int, int]]) -> dict[str, int]:
        """`expected`: page and stamp of every page of this device that anyone uses."""
        for book in (self._pool, self._lender, self._borrower):
            book.validate()
        ledger, shown = self._pool.ledger, self._vm.os_pages(self._vm.window)
        unseen = sum(shown.get(page) != page for page in self._stamps)
        away = [page for page in shown if self._is_borrowed(page)]
        miscounted = ledger.owned(self._owner) + ledger.holders.held(self._owner) != len(
            self._stamps
        )
        wrong = sum(not self._right(at) for at in self._stamps)
        wrong += sum(not self._filled(page, stamp) for page, stamp in expected)
        budget = self._pool.total * self._vm.page_bytes
        return {
            "corrupted": wrong,
            "disagreements": unseen
            + miscounted
            + (len(away) != ledger.borrowed.total())
            + (self._vm.physical_bytes() > budget),
            "strangers": self._strangers(),
            "free": self._pool.free,
            "lent": self._pool.ledger.owned(OWNER),
            "borrowed": self._pool.ledger.borrowed.total(),
            "unused": self._borrower.unused,
            "own": ledger.owned(self._owner),
        }

    def cost(self, peer: str, call: str, data: bytes, n: int) -> tuple[float, bytes]:
        """Seconds of one step, all of `n` pages at once, and the message that it led to."""
        message = decode(data) if data else None
        answer: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent | None = None
        start = time.perf_counter()
        if call == "lend":
            lease = self._lend(peer, n)
            assert isinstance(lease, Lease)
            answer = PagesLentEvent(lease)
        elif call == "accept":
            assert message is not None
            assert self._accept(message.lease) is None
        elif call == "map":
            taken = self._borrower.take(self._owner, n)
            assert not isinstance(taken, Short)
            self._vm.prefault(taken)
            self._taken = taken
        elif call == "touch":
            for page in self._taken:
                self._view(self._vm.window.address(page))[:] = 1
            self._wait()
        elif call == "ask_back":
            (lease,) = self._lender.leases(peer)
            part = self._lender.recall(lease, 1e9)
            assert part is not None
            answer = PagesRecalledEvent(part)
        elif call == "unmap":
            assert message is not None
            pages = [used.page for used in self._borrower.recall(message.lease)]
            assert len(pages) == n
            self._borrower.release(self._owner, pages)
            (answer,) = map(PagesReturnedEvent, self._borrower.settle())
        elif call == "take_back":
            assert message is not None
            assert self._lender.returned(message.lease) is None
        seconds = time.perf_counter() - start
        return seconds, encode(answer) if answer else b""

    def _write(self, pages: Sequence[int], stamp: int) -> list[tuple[int, int]]:
        """Fill pages with `stamp` and the numbers after it; returns (page, its stamp) each."""
        written = [(page, stamp + i) for i, page in enumerate(pages)]
        for page, mark in written:
            self._view(self._vm.window.address(page))[:] = mark
        self._wait()
        self._stamps.update(written)
        return written

    def _drop(self, pages: Sequence[int]) -> None:
        self._borrower.release(self._owner, pages)
        for page in pages:
            del self._stamps[page]

    def _is_borrowed(self, page: int) -> bool:
        return page >= self._vm.n_pages

    def _view(self, address: int, n: int = 1) -> Any:
        """Of `n` pages, as 64-bit numbers."""
        shape = (n * self._vm.page_bytes // 8,)
        if self._torch is None:
            return array_at(address, shape, np.int64)
        import torch

        from ballast.memory.cuda.tensor import cuda_tensor_at

        return cuda_tensor_at(address, shape, torch.int64, torch.device(self._torch))

    def _wait(self) -> None:
        """Until what was written is there: whoever unmaps it does not wait."""
        if self._torch is not None and self._torch.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self._torch)

    def _right(self, page: int) -> bool:
        view = self._view(self._vm.window.address(page))
        return bool((view[:: STRIDE // 8] == self._stamps[page]).all())

    def _filled(self, page: int, stamp: int) -> bool:
        if self._torch is None:
            fd = self._vm.export(()).fd
            assert fd is not None
            data = os.pread(fd, self._vm.page_bytes, page * self._vm.page_bytes)
            return bool((np.frombuffer(data, np.int64)[:: STRIDE // 8] == stamp).all())
        self._vm.map(self._beside, 0, [page], alias=True)
        found = bool((self._view(self._beside.base)[:: STRIDE // 8] == stamp).all())
        self._vm.unmap(self._beside, 0, 1)
        return found

    def _strangers(self) -> int:
        """Memory of others that is kept for nothing: devices on a CPU, on a GPU pages."""
        if isinstance(self._vm, CudaVm):
            return self._vm.imported - self._pool.ledger.borrowed.total()
        return len(self._memories()) - 2

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


def encode(word: PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent) -> bytes:
    return encode_message(LeaseMsg.of(word))


def decode(data: bytes) -> PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent:
    message = decode_to_worker(data)
    assert isinstance(message, LeaseMsg)
    return message.event


def run(connection: Connection, name: str, page: int, n_pages: int, gpu: int | None) -> None:
    """The process: until the pipe is closed. `gpu`: which, as CUDA counts; None: a CPU."""
    if gpu is None:
        work(connection, Worker(name, MemfdVm(page, n_pages), n_pages, None))
    work(connection, Worker(name, CudaVm(CudaDriver(), gpu, page, n_pages), n_pages, f"cuda:{gpu}"))


def work(connection: Connection, worker: Worker) -> NoReturn:
    """What is asked for, until nobody can ask any more."""
    while True:
        try:
            command, *arguments = msgspec.msgpack.decode(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer: Any = [True, getattr(worker, command)(*arguments)]
        except (BallastError, AssertionError, OSError) as error:
            answer = [False, f"{command}: {type(error).__name__}: {error}"]
        connection.send_bytes(msgspec.msgpack.encode(answer))
