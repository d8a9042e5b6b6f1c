"""Requests follow a model that migrates, with their KV, in virtual time: nothing is told twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.fleet import (
    DeviceCapacity,
    FleetDecision,
    FleetView,
    ModelDemand,
    Place,
    Withdraw,
)
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.engine.state import DeviceState
from ballast.engine.story_file import StoryFile
from ballast.policy import presets
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.replica_choice import Replica, held_prefix
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.cluster_files import ClusterFiles
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from ballast.sim.topology import APART, ClusterLinks, PeerLinks
from tests.effort import some
from tests.sim.test_cluster import spec

EVERY = 1.0
OUTPUT = 300


class BackAndForth(FleetPolicy):
    """A model is placed on the other device, then withdrawn from the first, again and again."""

    @property
    def moves(self) -> bool:
        return True

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return {need.model: [rooms[0].device] for need in needs}

    def route(self, replicas: Sequence[Replica]) -> str:
        return held_prefix([r for r in replicas if r.resident] or replicas)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        turn = memo if isinstance(memo, int) else 0
        here = [d.name for d in view.devices if d.serves("m")]
        free = [d.name for d in view.devices if not any(h.model == "m" for h in d.hosting)]
        actions: list[Place | Withdraw] = []
        if turn % 2 and free:
            actions.append(Place("m", free[0], "a test", activate=True))
        elif len(here) > 1:
            actions.append(Withdraw("m", here[0], "a test"))
        return FleetDecision(tuple(actions), turn + 1, view.now + EVERY)


@pytest.fixture(autouse=True)
def back_and_forth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PLACEMENTS, "back-and-forth", BackAndForth())  # type: ignore[arg-type]


def arrivals(n: int) -> list[Submission]:
    return [
        Submission(
            id=f"r{i}",
            model="m",
            prompt=tuple(1 + (i * k) % 97 for k in range(100 + 37 * (i % 11))),
            max_tokens=OUTPUT,
            arrival=0.2 * i,
            ignore_eos=True,
        )
        for i in range(n)
    ]


class Run:
    """What came of one; every device's story replays."""

    def __init__(self, preset: str, joints: ClusterLinks, path: Path, n: int = 40) -> None:
        self.tokens: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        self.ends: dict[str, Output] = {}
        self.files: list[StoryFile] = []
        self.where: defaultdict[str, set[str]] = defaultdict(set)
        model = spec("m")
        self.cluster = Cluster(
            parse_kinds("2xH100-80G"),
            [model],
            resolve(preset, placement="back-and-forth"),
            self._heard,
            watch=self._watch,
            sink_of=lambda device: self._file(path, device).write,
            files=ClusterFiles(joints=joints),
        )
        self.cluster.run(arrivals(n))
        for file in self.files:
            file.close()
        for device in self.cluster.devices.values():
            device.state.validate()
            assert not any(m.kv.counts.used_blocks for m in device.state.models.values())
        for life in read_device_stories(path):
            found = replay(life)
            assert found.difference is None, found.difference

    def _file(self, path: Path, device: str) -> StoryFile:
        self.files.append(StoryFile(path, device))
        return self.files[-1]

    def _watch(self, device: str, at: float, state: DeviceState) -> None:
        state.validate()

    def _heard(self, device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            self.tokens[output.request_id].append((output.index, at))
            self.where[output.request_id].add(device)
        else:
            assert output.request_id not in self.ends, output
            self.ends[output.request_id] = output

    @property
    def longest(self) -> float:
        """Between two tokens of a request that had them from several devices."""
        several = [self.tokens[i] for i, at in self.where.items() if len(at) > 1]
        return max(b - a for result in several for (_, a), (_, b) in pairwise(result))


JOINED = {
    "nvlink": ClusterLinks(per_host=2, peers=PeerLinks.NVLINK, port=LinkRates.even(200e9)),
    "pcie": ClusterLinks(per_host=2, peers=PeerLinks.PCIE),
    "memory": ClusterLinks(per_host=2, peers=PeerLinks.MEMORY),
    "network": ClusterLinks(network=400e9),
}


RUNS = [
    *(("balloon", "pcie"), ("balloon", "memory"), ("recompute+fcfs", "nvlink")),
    ("balloon", "network"),
    *(("balloon", "nvlink"), ("prism", "pcie")),
]


@pytest.mark.parametrize(("preset", "joints"), some(RUNS, 4))
def test_every_request_is_told_whole_and_once(preset: str, joints: str, tmp_path: Path) -> None:
    ran = Run(preset, JOINED[joints], tmp_path / "story")
    assert ran.cluster.controller.moved > 10
    for result in ran.tokens.values():
        assert [index for index, _ in result] == list(range(OUTPUT))
    assert len(ran.ends) == 40
    assert all(isinstance(end, FinishedOutput) for end in ran.ends.values())
    assert sum(len(at) > 1 for at in ran.where.values()) > 10
    assert ran.longest < 0.1


def test_devices_that_do_not_reach_each_other_keep_their_requests(tmp_path: Path) -> None:
    ran = Run("balloon", APART, tmp_path / "story")
    assert ran.cluster.controller.moved == 0
    assert all(len(at) == 1 for at in ran.where.values())
    assert all(isinstance(end, FinishedOutput) for end in ran.ends.values())
