"""Two live GPUs that lend to each other, over stand-ins of the driver that know of each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ballast.bench.inprocess import InProcess
from ballast.core.actions import Lend, Recall
from ballast.core.event import Event
from ballast.core.lease import PagesLentEvent, PeerGoneEvent, PeerReleasedReport
from ballast.core.settings import FleetSettings
from ballast.memory.cuda.vm import CudaVm
from tests.engine.gpus import beside, serving
from tests.engine.holding import held
from tests.engine.test_lending import (  # noqa: F401
    Pair,
    asked,
    expected,
    fleet,
    pair,
    path,
    settle,
)
from tests.memory.fake_cuda import FakeDriver

LENDER, BORROWER = "cuda:0", "cuda:1"


class Gpus(Pair):
    """Each has a driver, as each would in a process of its own; pages are fetched with a lease."""

    names = (LENDER, BORROWER)

    def __init__(self, fleet: FleetSettings, story: Path) -> None:  # noqa: F811
        self.drivers = {
            name: FakeDriver(n_bytes=1 << 30, devices=2, exclusive=True) for name in self.names
        }
        super().__init__(fleet, story)

    def _serve(self, fleet: FleetSettings) -> InProcess:  # noqa: F811
        on_cpu = replace(fleet.device, name="cpu:0")
        with InProcess(replace(fleet, device=on_cpu, story_path=None)) as server:
            state = server.device.state
            pages = state.pool.total - state.set_aside
        device = replace(fleet.device, threads=None, graphs=0)
        return serving(beside(replace(fleet, device=device), pages), self.drivers[device.name])

    def _pass_on(self, other: str, word: Event) -> None:
        if not isinstance(word, PagesLentEvent):
            super()._pass_on(other, word)
            return
        lease, device = word.lease, self.servers[other].device
        lender = self.servers[lease.lender].device
        exported = lender.export(lender.offered(other, lease.epoch, lease.id))
        assert exported is not None
        device.accept_lease(lease, (device.import_pages(exported),))

    def validate(self, lent: int) -> None:
        super().validate(lent)
        self.validate_driver(lent)

    def validate_driver(self, lent: int) -> None:
        vm = self.borrower.device.vm
        assert isinstance(vm, CudaVm)
        assert vm.imported == lent == self.drivers[LENDER].elsewhere()


def test_tokens_are_the_same_on_borrowed_pages_and_when_the_lender_dies(
    fleet: FleetSettings,  # noqa: F811
    expected: dict[str, list[int]],  # noqa: F811
    tmp_path: Path,
) -> None:
    with pair(fleet, tmp_path, Gpus) as made:
        assert made.order(Lend(BORROWER, 60))().code is None
        settle(made)
        made.validate(60)
        with held(made.borrower, 50, "r7") as until_held:
            made.borrower.submit(*asked(10))
            until_held()
            assert made.borrower.device.state.models["base"].kv.borrowed.pages > 0
            outcome = made.order(Recall(BORROWER, 40, 60.0))
        assert outcome().code is None
        # They are the lender's again while requests go on: its driver would see it otherwise.
        assert made.order(Lend(BORROWER, 50))().code is None
        settle(made)
        made.validate_driver(70)
        made.borrower.device.post(PeerGoneEvent(LENDER, 1))
        made.wait_for(lambda: made.said(PeerReleasedReport) == 1)
        made.validate_driver(0)
        made.servers[LENDER].device.post(PeerGoneEvent(BORROWER, 1))
        made.borrower.wait()
        settle(made)
        made.validate(0)
        assert {id: a.tokens for id, a in made.borrower.answers.items()} == expected
    assert all(driver.is_clean() for driver in made.drivers.values())
