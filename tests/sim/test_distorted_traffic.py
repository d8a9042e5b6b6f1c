"""Estimates that are taken away, or wrong, are so by the factor given, for all who read them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from ballast.bench.cluster_run import run_cluster
from ballast.core.compute import ComputeDecision, ComputeView
from ballast.core.price_curve import PriceCurve
from ballast.core.traffic import PRIOR_OUTPUT, PRIOR_REQUESTS, TrafficStats
from ballast.core.view import DeviceView
from ballast.policy.admission.least_harm import LeastHarm
from ballast.policy.compute.deadline import Deadline
from ballast.policy.memory.arbiter import Arbiter
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.distorted_traffic import Distortion
from ballast.sim.model_catalogue import catalogue
from benchmarks.arbiter_workloads import SLO, steady

NOW = 8.0 * 29


def seen(traffic: TrafficStats | None = None) -> TrafficStats:
    """A request every 8 s: 40 tokens of prompt, half of them cached, and 30 of output."""
    traffic = traffic or TrafficStats()
    for k in range(30):
        traffic = traffic.arrived(8.0 * k).ended(40, 30, 20)
    return traffic


def distorted(**factors: float) -> TrafficStats:
    return seen(Distortion(**factors).of(TrafficStats()).restarted(0.0))


def test_what_is_not_distorted_is_estimated_as_it_is_learned() -> None:
    same = distorted()
    for name in ("arrivals", "prompts", "outputs", "gaps", "reuse"):
        assert getattr(same, name) == getattr(seen(), name)
    assert same.expected_outputs(12) == 12
    assert same.expected_outputs(50, 60) == seen().expected_outputs(50, 60) == 46


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_estimates_are_wrong_by_their_factors(factor: float) -> None:
    wrong = distorted(arrivals=factor, lengths=factor, reused=factor)
    assert wrong.expected(NOW).rate == pytest.approx(factor * seen().expected(NOW).rate)
    assert wrong.expected(NOW).output_tokens == pytest.approx(30 * factor)
    assert wrong.reuse.found == pytest.approx(min(1.0, 0.5 * factor))
    # The period of 8 s is one of 24 s, or of 2.7 s, within the width of a bin.
    soon = 8.0 / factor
    assert wrong.chance(NOW, soon * 1.5) > 0.8
    assert wrong.chance(NOW, soon / 2) < 0.3


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
@pytest.mark.parametrize("n", [1, 2, 30])
def test_lengths_are_wrong_whatever_a_request_allows(factor: float, n: int) -> None:
    """Those that have not ended count too."""
    traffic = Distortion(lengths=factor).of(TrafficStats())
    for _ in range(n):
        traffic = traffic.ended(40, 30)
    expected = (PRIOR_REQUESTS * PRIOR_OUTPUT + 30 * n + 60) / (PRIOR_REQUESTS + n)
    assert traffic.expected_outputs(5000, 60) == round(factor * expected)


def test_without_an_estimate_its_prior_stands() -> None:
    nothing = distorted(arrivals=0, lengths=0, reused=0)
    assert nothing.expected_outputs(7000) == PRIOR_OUTPUT
    assert nothing.reused(0.05) == 0.05
    assert nothing.chance(NOW, 4.0) > seen().chance(NOW, 4.0)  # no period is known
    assert nothing.expected(NOW).rate == seen().expected(NOW).rate


class Watch:
    """Expected lengths that each part of a preset has read."""

    seen: ClassVar[dict[str, set[int]]] = {}

    @classmethod
    def note(cls, view: DeviceView, part: str) -> None:
        found = {m.traffic.expected_outputs(4000) for m in view.models if m.waiting or m.running}
        cls.seen.setdefault(part, set()).update(found)


class Memory(Arbiter):
    def prices(self, view: DeviceView, memo: object) -> PriceCurve:
        Watch.note(view, "prices")
        return Arbiter.prices(self, view, memo)


class Admission(LeastHarm):
    def evaluate(self, view: DeviceView) -> tuple[set[str], float]:
        Watch.note(view, "admission")
        return LeastHarm.evaluate(self, view)


class Order(Deadline):
    def __call__(self, view: ComputeView, memo: object) -> ComputeDecision:
        works = [view.work_of(r.model) for r in view.runnable]
        Watch.seen.setdefault("order", set()).update(d.outputs for w in works for d in w.decodes)
        return Deadline.__call__(self, view, memo)


def expected_anywhere(lengths: float) -> set[str]:
    """Parts of a preset that expect answers to end at once, where lengths are wrong by a factor."""
    Watch.seen = {}
    spec = replace(catalogue()["Llama-3.2-1b"].spec(max_model_len=4096, slo=SLO), name="m")
    preset = replace(resolve("ballast"), memory=Memory(), admission=Admission(), compute=Order())
    run_cluster(
        preset,
        parse_kinds("1xH100-80G"),
        [spec],
        steady(["m"], 4.0, 4.0, 0),
        {"m": SLO},
        estimates=Distortion(lengths=lengths).impose,
        open_ended=True,
    )
    return {part for part, lengths in Watch.seen.items() if 1 in lengths}


def test_all_parts_of_a_preset_read_the_wrong_estimate() -> None:
    """Published prices, admission and the order of compute, not the memory policy alone."""
    assert expected_anywhere(lengths=1e-9) == {"prices", "admission", "order"}
    assert expected_anywhere(lengths=1.0) == set()
