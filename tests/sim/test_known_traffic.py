"""Oracle estimates: what simulated models know of their future, and that policies see it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ballast.bench.cluster_run import run_cluster
from ballast.core.actions import Decision
from ballast.core.view import DeviceView
from ballast.policy.memory.balloon import Balloon
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.known_traffic import HORIZON, KnownTraffic, reveal
from ballast.sim.model_catalogue import catalogue
from benchmarks.arbiter_workloads import SLO, steady


def test_what_will_come_is_known_and_stays_known() -> None:
    seen = KnownTraffic(coming=(1.0, 4.0, 5.0)).restarted(0.0).arrived(1.0).ended(10, 20)
    assert [seen.chance(2.0, s) for s in (1.0, 2.5)] == [0.0, 1.0]
    assert seen.chance(5.0, 100.0) == 0.0
    assert seen.rate(2.0) == 2 / HORIZON
    assert seen.expected_outputs(300) == 300


class Watching(Balloon):
    """A policy that records how likely it takes a request to be within a second."""

    seen: ClassVar[set[float]] = set()

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        self.seen.update(m.traffic.chance(view.now, 1.0) for m in view.models)
        return Balloon.__call__(self, view, memo)


def test_policies_see_what_is_known() -> None:
    spec = replace(catalogue()["Llama-3.2-1b"].spec(max_model_len=4096, slo=SLO), name="m")
    work = steady(["m"], 2.0, 3.0, 0)
    run_cluster(
        replace(resolve("balloon"), memory=Watching()),
        parse_kinds("1xH100-80G"),
        [spec],
        work,
        {"m": SLO},
        estimates=reveal,
    )
    assert Watching.seen == {0.0, 1.0}
