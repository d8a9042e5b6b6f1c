"""A cluster's run is reported like any other, and says what each device did."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from ballast.bench.cluster_run import busiest_of, run_cluster, traffic_of
from ballast.bench.run_options import workload_of
from ballast.core.cost import Traffic
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.workload.workload import Workload, WorkloadRequest
from tests.sim.test_cluster import spec

NAMES = [f"m{i}" for i in range(5)]


def test_a_run_is_reported_by_model_and_by_device() -> None:
    work = workload_of("bursty", NAMES, rate=3.0, seconds=40.0, most_tokens=1024, seed=3)
    received: list[int] = []
    ran = run_cluster(
        resolve("balloon"),
        parse_kinds("1xH100-80G,1xA100-80G"),
        [spec(name) for name in NAMES],
        work,
        dict.fromkeys(NAMES, Slo()),
        progress=received.append,
    )
    assert ran.report.total.answered == len(work.requests) == received[-1]
    assert sorted(m for d in ran.devices.values() for m in d["models"]) == NAMES
    assert set(ran.devices) == {"H100-80G:0", "A100-80G:1"}
    assert ran.jobs == sum(d["jobs"] for d in ran.devices.values()) > 0
    result = json.loads(json.dumps(ran.to_json()))
    assert result["devices"]["H100-80G:0"]["activations"] > 0
    assert result["total"]["answered"] == len(work.requests)


def test_what_is_sure_to_miss_is_heard_at_once() -> None:
    work = workload_of("poisson", NAMES, rate=20.0, seconds=4.0, most_tokens=1024, seed=3)
    missed: Counter[str] = Counter()
    ran = run_cluster(
        resolve("static"),
        parse_kinds("1xA10"),
        [spec(name) for name in NAMES],
        work,
        dict.fromkeys(NAMES, Slo(ttft=1.0)),
        missed=lambda model: missed.update([model]),
    )
    assert ran.report.total.failed > 0
    for name, served in ran.report.models.items():
        assert missed[name] == served.requests - served.attained_ttft


def test_the_busiest_seconds_of_a_model_are_found() -> None:
    """Ten quiet requests, and a burst of six of other lengths within ten seconds."""
    quiet = [(12.0 * i, "a", 10, 20) for i in range(10)]
    burst = [(50.0 + i, "a", 100, 200) for i in range(6)]
    requests = (
        WorkloadRequest(id=n, at=at, model=model, prompt_tokens=prompt, output_tokens=output)
        for n, (at, model, prompt, output) in enumerate([*quiet, *burst, (1.0, "b", 7, 9)])
    )
    work = Workload.of("made", requests)
    found = busiest_of(work)
    assert found["b"] == Traffic(0.1, 7, 9)
    # The quiet one at 48 s is nine seconds before the burst's end and less.
    assert found["a"] == Traffic(0.7, pytest.approx(610 / 7), pytest.approx(1220 / 7))
    assert traffic_of(work)["a"].rate == pytest.approx(16 / 108)


@pytest.mark.parametrize("preset", ["ballast", "muxserve"])
def test_answers_end_where_they_do_whatever_bound_a_client_gives(preset: str) -> None:
    """Of clients that give none, too, and with steps that are passed over at once."""
    work = workload_of("bursty", NAMES[:2], rate=4.0, seconds=5.0, most_tokens=256, seed=3)
    ran = run_cluster(
        resolve(preset),
        parse_kinds("1xH100-80G"),
        [spec(name) for name in NAMES[:2]],
        work,
        dict.fromkeys(NAMES[:2], Slo()),
        open_ended=True,
    )
    asked = {r.id: r.output_tokens for r in work.requests}
    assert {r.id: r.output_tokens for r in ran.report.records} == asked
    assert all(r.answered for r in ran.report.records)
