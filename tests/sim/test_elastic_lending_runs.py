"""Devices that lend each other pages as the fleet policy has them do, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.fleet import FleetAction, LendPages
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.cluster_files import ClusterFiles
from ballast.sim.topology import ClusterLinks, PeerLinks
from tests.sim.test_cluster import spec

JOINED = ClusterLinks(per_host=4, peers=PeerLinks.NVLINK, port=LinkRates.even(400e9))


def burst(model: str, n: int, at: float) -> list[Submission]:
    """More requests at once than an L4 has KV memory for beside the weights of an 8B model."""
    return [
        Submission(
            id=f"{model}-{at}-{i}",
            model=model,
            prompt=tuple((i + 7 * j) % 1000 for j in range(3000)),
            max_tokens=100,
            arrival=at + 0.01 * i,
            ignore_eos=True,
        )
        for i in range(n)
    ]


class Run:
    """`devices` L4s with a model each; the first model has a burst, and then the second."""

    def __init__(
        self,
        preset: str,
        devices: int = 2,
        running: int = 64,
        placement: str | None = None,
        **options: float,
    ) -> None:
        models = [spec(f"m{i}", like="Llama-3-8b") for i in range(devices)]
        models = [replace(m, max_running=running) for m in models]
        self.first: dict[str, float] = {}
        self.ends = 0
        self.moves: list[FleetAction] = []
        self.borrowed: Counter[str] = Counter()
        self.cluster = Cluster(
            parse_kinds(f"{devices}xL4"),
            models,
            resolve(preset, options, placement=placement),
            self._record,
            watch=self._watch,
            on_move=self._move,
            files=ClusterFiles(joints=JOINED),
        )
        asked = [*burst("m1", 1, 0.0), *burst("m0", 20, 3.0), *burst("m1", 10, 12.0)]
        self.cluster.run(asked)
        assert self.ends == len(asked)
        arrivals = {s.id: s.arrival for s in asked}
        self.ttft = {id: at - arrivals[id] for id, at in self.first.items()}
        for device in self.cluster.devices.values():
            device.state.validate()

    def _record(self, device: str, at: float, output: Output) -> None:
        self.ends += isinstance(output, FinishedOutput)
        if isinstance(output, TokenOutput) and output.index == 0:
            self.first[output.request_id] = at

    def _watch(self, device: str, at: float, state: Any) -> None:
        pages = sum(state.lending.borrowed.values())
        self.borrowed[device] = max(self.borrowed[device], pages)

    def _move(self, at: float, action: FleetAction, refused: str | None) -> None:
        if refused is None:
            self.moves.append(action)

    def mean(self, model: str) -> float:
        found = [seconds for id, seconds in self.ttft.items() if id.startswith(model)]
        return sum(found) / len(found)


def test_a_busy_device_borrows_and_its_requests_wait_less() -> None:
    alone, lent = Run("balloon"), Run("swiftcache")
    assert alone.moves == []
    assert any(isinstance(a, LendPages) for a in lent.moves)
    entries = lent.cluster.devices["L4:0"].story.entries
    assert any(e.get("event") == "AskedBack" for e in entries)
    assert lent.borrowed["L4:0"] > 0
    assert lent.mean("m0") < 0.95 * alone.mean("m0")
    assert lent.mean("m1") < 1.1 * alone.mean("m1")  # the lender had its pages back


def test_pages_go_where_they_are_worth_more_and_come_back() -> None:
    alone, lent = Run("ballast", placement="work"), Run("ballast")
    assert alone.moves == []
    lends = [a for a in lent.moves if isinstance(a, LendPages)]
    assert {(a.lender, a.borrower) for a in lends} == {("L4:1", "L4:0")}
    assert all("a page is worth " in a.why for a in lends)
    assert lent.borrowed["L4:0"] > 0
    assert lent.mean("m0") < alone.mean("m0")
    entries = lent.cluster.devices["L4:0"].story.entries
    assert any(e.get("event") == "AskedBack" for e in entries)
    assert lent.mean("m1") < 1.15 * alone.mean("m1")  # the lender had its pages back


def test_requests_that_may_not_run_lack_no_pages() -> None:
    assert Run("swiftcache", running=2).moves == []


def test_the_master_alone_borrows_from_all_as_published() -> None:
    run = Run("swiftcache", devices=4, master=1.0, published=1.0)
    lent = [a for a in run.moves if isinstance(a, LendPages)]
    assert {a.borrower for a in lent} == {"L4:0"}
    assert len({a.lender for a in lent}) > 1
    assert run.borrowed["L4:0"] <= run.cluster.devices["L4:0"].state.pool.total
