"""Descriptors from other workers, and the order in which the device gets their messages."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from ballast.cluster.lending.lending_peers import LendingPeers
from ballast.core.event import Event
from ballast.core.lease import (
    Lease,
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
)
from ballast.core.units import KiB
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.vm import Exported
from ballast.memory.vm_memfd import MemfdVm
from ballast.transport.worker_messages.lending_messages import MeetPeerMsg, PeerEndedMsg
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 * KiB
DEADLINE = 240.0
N_PAGES = 80
LEASE = Lease(7, 1, "a", "b", tuple(range(70, 2, -1)))


class Device:
    """Implements `LendingDevice`; what it is told is in `heard`."""

    def __init__(self, vm: CudaVm | MemfdVm) -> None:
        self.vm = vm
        self.leases: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.received: queue.Queue[Event | Exported | tuple[Lease, int]] = queue.Queue()

    def post(self, event: Event) -> None:
        self.received.put(event)

    def export(self, pages: Sequence[int] = ()) -> Exported | None:
        return self.vm.export(pages)

    def offered(self, borrower: str, epoch: int, lease: int) -> tuple[int, ...]:
        return self.leases.get((borrower, epoch, lease), ())

    def import_pages(self, exported: Exported) -> Exported:
        assert isinstance(self.vm, CudaVm)
        return self.vm.open(exported)

    def add_peer(self, peer: str, epoch: int, exported: Exported) -> None:
        self.vm.attach(exported)
        self.received.put(exported)

    def accept_lease(self, lease: Lease, opened: tuple[Exported, ...]) -> None:
        for exported in opened:
            self.vm.attach(exported)
        self.received.put((lease, sum(len(exported.pages) for exported in opened)))

    def hear(self) -> object:
        return self.received.get(timeout=DEADLINE)


class Worker:
    """A device, or none any more, and what it hears of others."""

    def __init__(self, vm: CudaVm | MemfdVm) -> None:
        self.device: Device | None = Device(vm)
        self.said: queue.Queue[LendingMessage] = queue.Queue()
        self.peers = LendingPeers(self._use, self.said.put)

    @contextmanager
    def _use(self) -> Iterator[Device | None]:
        yield self.device


@contextmanager
def giving(lender: Worker) -> Iterator[None]:
    ended = threading.Event()

    def give() -> None:
        while not ended.is_set():
            select.select([lender.peers.socket], [], [], 0.01)
            lender.peers.serve_pages()

    thread = threading.Thread(target=give)
    thread.start()
    yield
    ended.set()
    thread.join()
    lender.peers.socket.close()


@pytest.fixture
def drivers() -> Iterator[tuple[FakeDriver, FakeDriver]]:
    made = FakeDriver(devices=2), FakeDriver(devices=2)
    yield made
    assert all(driver.is_clean() for driver in made)


@pytest.fixture
def gpus(drivers: tuple[FakeDriver, FakeDriver]) -> Iterator[tuple[Worker, Worker]]:
    """They have met: A, which lends `LEASE`, and B."""
    a, b = (Worker(CudaVm(driver, i, PAGE, N_PAGES)) for i, driver in enumerate(drivers))
    assert a.device is not None
    assert b.device is not None
    assert a.device.vm.populate(range(N_PAGES)) is None
    a.device.leases["b", 1, 7] = LEASE.pages
    with giving(a):
        b.peers.meet(MeetPeerMsg("a", 1, a.peers.socket.address))
        met = b.device.hear()
        assert isinstance(met, Exported)
        assert met.n_pages == N_PAGES
        yield a, b
    b.peers.socket.close()
    for worker in (a, b):
        if worker.device is not None:
            worker.device.vm.close()


def test_a_lease_is_fetched_and_what_is_said_later_is_heard_later(
    gpus: tuple[Worker, Worker], drivers: tuple[FakeDriver, FakeDriver]
) -> None:
    _, b = gpus
    assert b.device is not None
    back = PagesReturnedEvent(Lease(1, 1, "b", "a", (2,)))
    b.peers.handle(PagesLentEvent(LEASE))
    b.peers.handle(PagesRecalledEvent(LEASE))
    b.peers.forget(PeerEndedMsg("a", 1))
    received = [b.device.hear() for _ in range(3)]
    assert received == [(LEASE, 68), PagesRecalledEvent(LEASE), PeerGoneEvent("a", 1)]
    assert drivers[0].elsewhere() == 68
    b.peers.handle(back)
    b.peers.handle(PagesLentEvent(LEASE))  # of one who is gone: the device refuses it
    assert [b.device.hear() for _ in range(2)] == [back, PagesLentEvent(LEASE)]
    assert b.said.empty()


def test_what_cannot_be_imported_is_returned(
    gpus: tuple[Worker, Worker], drivers: tuple[FakeDriver, FakeDriver]
) -> None:
    _, b = gpus
    assert b.device is not None
    for _ in range(3):
        drivers[1].fail("import_fd", after=40)
    b.peers.handle(PagesLentEvent(LEASE))
    over = Lease(8, 1, "a", "b", (1, 2))
    b.peers.handle(PagesLentEvent(over))
    result = [b.said.get(timeout=DEADLINE) for _ in range(2)]
    assert result == [PagesReturnedEvent(LEASE), PagesReturnedEvent(over)]
    assert drivers[0].elsewhere() == 0
    drivers[1].fail("import_fd", after=40)
    b.peers.handle(PagesLentEvent(LEASE))
    assert b.device.hear() == (LEASE, 68), "it tries again"


def test_what_cannot_be_let_go_of_is_not_said_to_be_back(
    gpus: tuple[Worker, Worker], drivers: tuple[FakeDriver, FakeDriver]
) -> None:
    _, b = gpus
    assert b.device is not None
    drivers[1].fail("import_fd", after=40)
    drivers[1].fail("release", after=8)
    b.peers.handle(PagesLentEvent(LEASE))
    b.peers.handle(PagesRecalledEvent(LEASE))
    assert b.device.hear() == PagesRecalledEvent(LEASE)
    assert b.said.empty()
    assert drivers[0].elsewhere() == 32
    for handle in list(drivers[1].handles):
        drivers[1].release(handle)


def test_a_device_that_ends_meanwhile_gets_nothing(
    gpus: tuple[Worker, Worker], drivers: tuple[FakeDriver, FakeDriver]
) -> None:
    _, b = gpus
    assert b.device is not None
    vm, b.device = b.device.vm, None
    b.peers.handle(PagesLentEvent(LEASE))
    assert b.said.get(timeout=DEADLINE) == PagesReturnedEvent(LEASE)
    assert drivers[0].elsewhere() == 0
    vm.close()


def test_a_cpu_has_all_of_it_from_the_start() -> None:
    a, b = Worker(MemfdVm(PAGE, N_PAGES)), Worker(MemfdVm(PAGE, N_PAGES))
    assert a.device is not None
    assert b.device is not None
    b.peers.meet(MeetPeerMsg("nobody", 1, "nowhere"))
    with giving(a):
        b.peers.meet(MeetPeerMsg("a", 2, a.peers.socket.address))
        b.peers.handle(PagesLentEvent(LEASE))
        met, lent = b.device.hear(), b.device.hear()
    assert isinstance(met, Exported)
    assert lent == PagesLentEvent(LEASE)
    assert b.device.received.empty(), "nobody was met where nobody is"
    b.peers.socket.close()
    for worker in (a, b):
        assert worker.device is not None
        worker.device.vm.close()
